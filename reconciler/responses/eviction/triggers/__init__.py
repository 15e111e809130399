"""The triggers: each decides from recent samples whether the node lacks a resource that only an eviction releases.

Belongs here: one module a trigger, pure, with its signals and its memory; the table lists them all.

Does not belong here: which pod is evicted (`responses/eviction`).
"""
