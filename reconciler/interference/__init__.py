"""Interference detection as a whole: engine, monitor, recorder and recordings.

Belongs here: one pass: read the signals, evaluate all rules, publish what is asked of the plan, order evictions,
report.

Does not belong here: single detectors (`detectors`), and what is done about a verdict (`responses`).
"""
