"""Files of the node that are no control files (`file_catalog`).

Belongs here: reading them, writing them, and restoring them.

Does not belong here: which value they should have (`policies`), and control files (`actuators/cgroup`).
"""
