"""What turns wanted settings into kernel state: compare, order, record, write, read back.

Belongs here: every write to the node, a folder for each kind of object, with the records that a restore needs.

Does not belong here: which settings are wanted (`policies`), when they are applied (`control`), and how a single kernel
file is read and written (`cgroupfs`, `resctrl`).
"""
