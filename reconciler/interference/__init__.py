"""Interference detection as a whole: engine, monitor, recorder and recordings.

Single detectors are in `detectors`, what is done about a verdict in `responses`.
"""
