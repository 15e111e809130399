"""Proactive reclaim of BE memory, one bounded action at a time."""
