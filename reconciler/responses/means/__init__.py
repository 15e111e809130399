"""Methods to end a pod, one file each, and the notice to it before. ``table`` lists them all.

Belongs here: the Eviction API, the container runtime, signals and kills, each with its own result.

Does not belong here: whether and when a pod is ended (`responses/eviction`).
"""
