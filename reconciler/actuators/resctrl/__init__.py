"""resctrl groups, their schemata and threads.

Belongs here: the mount, one group for each class, moving threads, and restoring all of it.

Does not belong here: which shares are wanted (`policies`), and the format of the files (`resctrl`).
"""
