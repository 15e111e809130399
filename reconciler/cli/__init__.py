"""``bypassctl`` and ``state-dump``: one program that shows what the agent knows, wants and did, and undoes it.

Belongs here: one module a command, its options, and how a document is drawn on a screen.

Does not belong here: what the document holds (`daemon`), and anything that decides; nothing below imports this room.
"""
