"""What is wanted: one file per policy, and one table (``table``) that names them all.

Belongs here: laws and formulas with their sources, as pure functions from the node's view to settings or pools.

Does not belong here: measuring, waiting and writing (`signals`, `control`, `actuators`), and the choice of single CPUs
(`placement`).
"""
