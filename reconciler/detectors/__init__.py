"""Verdicts about victims: signals over time become ok, suspect, interfered or unknown, with ranked suspects."""
