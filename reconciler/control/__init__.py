"""The loop: inventory, planner, reconciler, sampler, persistence, holds, CPU hot-plug, quota lending, timeline.

What is wanted belongs to `policies`, how a file is written to `actuators`.
"""
