"""Policies: one file per policy, and one table (``table``) that lists them.

Belongs here: control laws and formulas with their sources, as pure functions from the node's view to settings or pools.

Does not belong here: measuring, waiting and writing (`signals`, `control`, `actuators`), and the choice of single CPUs
(`placement`).
"""
