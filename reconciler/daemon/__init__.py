"""The daemon's program: main, the agent composed of its rooms, its commands and status.

Belongs here: making the rooms in the order of their dependencies, start and stop, commands, and the state document.

Does not belong here: any part's own work; the HTTP side is `web`, the command line `cli`.
"""
