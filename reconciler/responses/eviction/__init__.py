"""Eviction: when to evict, which pod, how many at most, and the execution.

Belongs here: triggers, ranking, limits and exemptions, which are pure, and the executor with its journal and cases.

Does not belong here: the single ways to end a pod (`responses/means`), and the signals of the triggers (`signals`).
"""
