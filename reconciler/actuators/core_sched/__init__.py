"""Core-scheduling cookies on the threads of pods."""
