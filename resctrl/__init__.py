"""The kernel's resctrl files: what a machine's cache and bandwidth allocation offers. Knows no pods, no policy."""
