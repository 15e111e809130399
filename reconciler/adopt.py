"""After a daemon was killed: what the files hold now, where its last writes may be missing from the ledger.

Outcomes reach the disk in batches, originals before the first write, and each value is noted just before it is
written (`state.intents`). So after a SIGKILL a file may hold a value of ours that the ledger has not noted, and which
ones those may be is known. Any other value was written by somebody else meanwhile: it is left, and said.
"""

from cgroupfs.files import REAL, FileOps
from cgroupfs.hierarchy import Hierarchy
from cgroupfs.knobs import CATALOG
from reconciler.actuators.values import is_ours
from state.entry import US, same_group
from state.ledger import Ledger


def adopt_after_kill(hierarchy: Hierarchy, ledger: Ledger, *, files: FileOps = REAL) -> int:
    """Note what stands in our files as written by us; how many values were not noted yet."""
    adopted = 0
    for entry in list(ledger):
        knob = CATALOG.get(entry.knob)
        version = hierarchy.version(entry.controller)
        if entry.writer not in {US, ""} or knob is None or version is None:
            continue
        try:
            if not same_group(entry.inode, files.inode(hierarchy.trigger_directory(entry.path))):
                continue
            raw = files.read(hierarchy.directory(entry.controller, entry.path), entry.file).rstrip("\n")
            actual = knob.normal(raw, version)
            known = [knob.normal(text, version) for text in (entry.seen, entry.restore_text) if text is not None]
            ours = is_ours(knob, version, entry, ledger, actual)
        except (OSError, ValueError):
            # Gone or unreadable: the next look finds out, and says so.
            continue
        if ours and actual not in known:
            ledger.wrote(entry.key, before=None, after=raw)
            adopted += 1
    return adopted
