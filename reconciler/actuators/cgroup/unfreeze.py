"""Nothing stays frozen without somebody who watches: what we froze is thawed when we stop, start, or stand back.

Every other setting may outlive the daemon (fail static). A frozen pod does nothing, answers no probe, and on cgroup v1
cannot even be killed; so this one value is taken back at a stop, before anything else at a start, by the unit after a
crash (``bypassctl thaw``), and under a hold as well.

Evictions stop a pod for half a second to kill who forks too fast. That is in their own journal, not in the ledger: the
daemon thaws such a pod when it takes the eviction up, `thaw_killed` is for where no daemon follows.
"""

from typing import Final

from cgroupfs.files import REAL, FileOps
from cgroupfs.hierarchy import Hierarchy
from cgroupfs.knobs import CATALOG
from cgroupfs.log import get_log
from state.entry import same_group
from state.ledger import Ledger

_LOG: Final = get_log("unfreeze")
FREEZE: Final = "freeze"
ALWAYS_RESTORED: Final = frozenset({FREEZE})
"""Knobs whose values are given back even where a hold says that the file is to be left alone."""


def unfreeze(hierarchy: Hierarchy, ledger: Ledger, *, files: FileOps = REAL) -> tuple[list[str], list[str]]:
    """Thaw every group that the ledger says is frozen by us. Control files are written here and now: 0.4 ms each.

    Returns the group paths that run again, and what could not be done, in a person's words. Errors: none.
    """
    knob = CATALOG[FREEZE]
    done: list[str] = []
    failed: list[str] = []
    for entry in [one for one in ledger if one.knob == FREEZE]:
        version = hierarchy.version(entry.controller)
        if version is None:
            continue
        directory = hierarchy.directory(entry.controller, entry.path)
        try:
            if not same_group(entry.inode, files.inode(hierarchy.trigger_directory(entry.path))):
                continue
            if knob.decode(files.read(directory, entry.file), version) == 0:
                continue
            files.write(directory, entry.file, knob.encode(0, version))
            ledger.wrote(entry.key, before=None, after=knob.normal(files.read(directory, entry.file), version))
            done.append(entry.path)
        except (FileNotFoundError, ProcessLookupError):
            continue
        except (OSError, ValueError) as exc:
            failed.append(f"{entry.path}: still frozen: {exc}")
            _LOG.error("a group is still frozen", path=entry.path, error=str(exc))
    return done, failed
