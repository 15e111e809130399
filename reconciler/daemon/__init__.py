"""The daemon's program: main, the agent that wires the parts, its status.

Belongs here: building the parts in the order of their dependencies, start and stop, and the state document.

Does not belong here: any part's own work; the HTTP side is `web`, the command line `cli`.
"""
