"""Proactive reclaim of BE memory, one bounded action at a time.

Belongs here: how much is taken from which group, and stopping when it hurts.

Does not belong here: memory limits, which are control files (`actuators/cgroup`), and the settings of the policy
(`policies`).
"""
