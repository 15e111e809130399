"""Measured numbers with unit and age: what the policies and detectors look at."""
