"""What any daemon needs: supervisor, systemd notifications, instance lock, logs, time slices, work queue, counters.

Nothing in here knows pods, cgroups or policies.
"""
