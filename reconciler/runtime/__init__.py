"""Parts of any daemon: supervisor, systemd notifications, instance lock, logs, time slices, work queue, counters.

Belongs here: parts of a long-running trio program that would be the same in another one; the registry of plug-ins, late
imports, and the wait for a wake-up or a time, too.

Does not belong here: anything that depends on pods, cgroups or policies; connections to other programs are `clients`.
"""
