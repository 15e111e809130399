"""What is done about a verdict: the ladder, eviction as its last step, and the ways to end a pod.

Belongs here: the ladder's steps and when each is taken and undone, and what each asks of the plan.

Does not belong here: the verdict (`detectors`), and writing what a step asks for (`actuators`).
"""
