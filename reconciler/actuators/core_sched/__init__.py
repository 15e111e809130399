"""Core-scheduling cookies on the threads of pods.

Belongs here: the cookie of each thread, assigning it and clearing it.

Does not belong here: which pods may share a core (`policies`).
"""
