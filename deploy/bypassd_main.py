"""The programs of an installed bypassd: ``bypassd``, ``bypassctl`` and ``state-dump``.

In the wheel the packages lie in one private directory beside this file, because names as common as ``state`` have no
place in site-packages; this file puts that directory first on the path. In the source tree they lie one level up.
"""

import os
import sys
from contextlib import suppress
from typing import NoReturn


def _home() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    private = os.path.join(here, "bypassd")
    sys.path.insert(0, private if os.path.isdir(private) else os.path.dirname(here))


def _find_c_library() -> None:
    """Answer at once what libraries ask for at their import: ctypes starts ldconfig for that, which has no stints.

    glibc's names, which are the same on every architecture; musl's are found as before.
    """
    import ctypes.util

    names, find = {"c": "libc.so.6", "pthread": "libpthread.so.0"}, ctypes.util.find_library
    with suppress(OSError, ValueError):
        if os.confstr("CS_GNU_LIBC_VERSION"):
            ctypes.util.find_library = lambda name: names.get(name) or find(name)


def bypassd() -> int:
    """The daemon."""
    _home()
    if sys.argv[1:2] == ["run"]:
        # Half a second of imports, beside online pods: in short stints, too.
        from reconciler.runtime.stint_timer import TIMER  # the path is known only now

        TIMER.install()
        TIMER.run()
        from reconciler.runtime import own_weight

        own_weight.begin()
        _find_c_library()
    from reconciler.daemon.main import main

    return main()


def bypassctl() -> NoReturn:
    """The command line."""
    _home()
    from reconciler.cli.main import program

    program(sys.argv[1:])


def state_dump() -> NoReturn:
    """``bypassctl dump`` under the name that the design gives it."""
    _home()
    from reconciler.cli.main import program

    program(sys.argv[1:] if sys.argv[1:] == ["--version"] else ["dump", *sys.argv[1:]], "state-dump")
