"""One value on every process, or every thread, of BE containers: ``oom_score_adj``, and the scheduling policy.

Belongs here: listing the members of a container, reading, recording, writing and restoring that value
(``process_values``), and a module for each such value.

Does not belong here: which containers get which value (`policies`).
"""
