"""Headroom: CPU and memory that are allocatable to BE work, smoothed over time.

Belongs here: the amounts, their smoothing, and the report that other components read; pure, but for the sampler and the
report's file.

Does not belong here: which pod runs on which CPU (`placement`), and what BE pods get now (`policies`).
"""
