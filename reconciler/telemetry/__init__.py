"""Metrics and their Prometheus text.

Belongs here: the snapshot of all numbers, their names and help texts, and the exposition format.

Does not belong here: counting (`runtime` and each part), and the HTTP answer (`web`).
"""
