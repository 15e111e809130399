"""resctrl groups, their schemata and threads."""
