"""What holds for all tests."""

from hypothesis import HealthCheck, settings

# How fast examples are made says something about the machine, which others share, and nothing about the code.
settings.register_profile("shared machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared machine")
