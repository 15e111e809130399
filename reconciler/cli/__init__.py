"""``bypassctl`` and ``state-dump``: one program that shows what the agent knows, wants and did, and undoes it."""
