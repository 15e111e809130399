"""Files of the kernel that are no control files: ``oom_score_adj`` of processes, and files of the node (`catalog`).

Belongs here: reading them, writing them, and restoring them.

Does not belong here: which value they should have (`policies`), and control files (`actuators/cgroup`).
"""
