"""What to do about it: sources, plan, act, daemon, command line.

Belongs here: the rooms (packages) that docs/architecture.md draws, and the version.

Does not belong here: any module of its own, and what needs no knowledge of pods: control files are `cgroupfs`, cache
allocation files `resctrl`, models and the store `state`.
"""

__version__ = "0.1.0"
