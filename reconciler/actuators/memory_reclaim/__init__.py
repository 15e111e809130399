"""Proactive reclaim of BE memory, one bounded action at a time.

Belongs here: reclaiming a given amount from a group, and cancelling it.

Does not belong here: how much to reclaim (`reconciler.control.reclaim_loop`), memory limits, which are control files
(`actuators/cgroup`), and the settings of the policy (`policies`).
"""
