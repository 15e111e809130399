"""``bypassctl`` and ``state-dump``: one program that shows the agent's inventory, plan and actions, and undoes them.

Belongs here: one module a command, its options, and how a document is shown on a screen.

Does not belong here: the content of the document (`daemon`), and anything that decides; nothing below imports this
room.
"""
