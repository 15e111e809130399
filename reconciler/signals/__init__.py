"""Measured numbers with unit and age: what the policies and detectors decide by.

Belongs here: one reader a kernel interface, the catalog of signals, and their recent past.

Does not belong here: what a number means for a victim (`detectors`), and facts about pods (`sources`).
"""
