"""Core-scheduling cookies on the threads of pods.

Belongs here: which thread has which cookie, giving and taking it back.

Does not belong here: which pods may share a core (`policies`).
"""
