"""What any daemon needs: supervisor, systemd notifications, instance lock, logs, time slices, work queue, counters.

The registry of plug-ins, late imports, and the wait for a wake-up or a time are here, too. Nothing in here knows pods,
cgroups or policies.
"""
