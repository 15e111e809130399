"""What turns wanted settings into kernel state: compare, order, record, write, read back.

Belongs here: every write to the node, a folder for each kind of object, with what is remembered to undo it.

Does not belong here: what is wanted (`policies`), when it is wanted (`control`), and how a single kernel file is read
and written (`cgroupfs`, `resctrl`).
"""
