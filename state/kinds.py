"""The kinds of object that have values in the ledger.

Each kind has a codec (`reconciler.actuators.codec`), which the auxiliary actuator of the kind names in its row of
`reconciler.control.side_actuators`.
"""

from typing import Final

CGROUP: Final = "cgroup"
"""Control files. The actuator of `reconciler.actuators.cgroup` writes and restores them."""
SYSCTL: Final = "sysctl"
"""Values in /proc/sys. Object ``/``, field the kernel's name."""
FILE: Final = "file"
"""Other files outside of every cgroup. Object ``/``, field the name in `reconciler.actuators.file_catalog`."""
PROCESS: Final = "process"
"""Values of processes, by /proc. Object the group path of their container."""
THREAD: Final = "thread"
"""Scheduling policies of threads. Object the group path of their container."""
COOKIE: Final = "core_sched"
"""Core scheduling cookies. Object the cookie's number, in hexadecimal."""
RESCTRL: Final = "resctrl"
"""Object ``/`` (the root of the resctrl tree), or the directory of a mount of ours."""
INTERRUPT: Final = "interrupt"
"""Places of interrupts. Object the number and the actions, ``24 eth0-rx-0``, field the kernel's file."""
CAPACITY: Final = "capacity"
"""Capacity files. Object the directory of a pod's volume, field the file's name."""
NETWORK: Final = "network"
"""Object the name of an interface or device."""
NODE_OBJECT: Final = "node_object"
"""The node's object in the cluster. Object its path at the API server, field the mark on it."""
OUTLIVE_BOOT: Final = frozenset({NODE_OBJECT})
"""Kinds whose objects are not this machine's: a reboot does not undo what was changed there."""
