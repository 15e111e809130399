"""The loop: inventory, planner, reconciler, sampler, persistence, holds, CPU hot-plug, quota lending, timeline.

Belongs here: what is known of the node now, when it is looked at, and that the plan is applied.

Does not belong here: what is wanted (`policies`), how it is written (`actuators`), and who knows it (`sources`,
`signals`).
"""
