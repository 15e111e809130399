"""Responses to a verdict: the ladder, eviction as its last step, and the ways to end a pod.

Belongs here: the ladder's steps, when each is taken and undone, and its demand on the plan.

Does not belong here: the verdict (`detectors`), and writing a step's settings (`actuators`).
"""
