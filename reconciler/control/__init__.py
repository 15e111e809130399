"""The loop: inventory, planner, reconciler, sampler, persistence, holds, CPU hot-plug, quota lending, timeline.

Belongs here: the inventory of the node, when it is reconciled, and applying the plan.

Does not belong here: what is wanted (`policies`), how it is written (`actuators`), and where readings come from
(`sources`, `signals`).
"""
