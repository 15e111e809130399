"""The triggers: each judges by the recent past whether the node lacks what only an eviction gives back.

Belongs here: one module a trigger, pure, with its signals and its memory; the table names them all.

Does not belong here: which pod is evicted (`responses/eviction`).
"""
