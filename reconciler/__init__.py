"""What to do about it: sources, plan, act, daemon, command line."""

__version__ = "0.1.0"
