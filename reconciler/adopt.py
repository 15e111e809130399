"""After a daemon was killed: what the files hold now, where its last writes may be missing from the ledger.

Outcomes reach the disk in batches, originals before the first write. So after a SIGKILL a file may hold a value of ours
that the ledger has not noted. Every value in a file of ours that nobody else is known to have written is taken to be
ours: the other guess would leave our limits on the node for ever. What the kubelet wanted meanwhile is not lost by it:
runc's own record tells, and that is what is restored to.
"""

from cgroupfs.files import REAL, FileOps
from cgroupfs.hierarchy import Hierarchy
from cgroupfs.knobs import CATALOG
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
        except (OSError, ValueError):
            # Gone or unreadable: the next look finds out, and says so.
            continue
        if actual not in known:
            ledger.wrote(entry.key, before=None, after=raw)
            adopted += 1
    return adopted
