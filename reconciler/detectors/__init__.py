"""Verdicts about victims: signals over time become ok, suspect, interfered or unknown, with ranked suspects.

Belongs here: one module a detector, the rules that combine them, and the ranking of suspects; pure.

Does not belong here: measuring (`signals`), the responses to a verdict (`responses`), and the pass over all rules
(`interference`).
"""
