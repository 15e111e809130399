"""The kernel's resctrl files: cache and bandwidth allocation of a machine. Independent of pods and policies."""
