"""Interference detection as a whole: engine, monitor, recorder and recordings.

Belongs here: one pass: read the signals, evaluate all rules, publish the demands on the plan, order evictions, report.

Does not belong here: single detectors (`detectors`), and the responses to a verdict (`responses`).
"""
