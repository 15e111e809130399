"""Which texts a control file may hold by our doing: what we are about to write, and what becomes of it half-way."""

from collections.abc import Iterable, Iterator

from cgroupfs.codecs import Version
from cgroupfs.devices import DeviceLimits
from cgroupfs.knobs import CATALOG, Knob
from cgroupfs.steps import WriteStep
from state.entry import FileKey, LedgerEntry
from state.ledger import Ledger


def intended(steps: Iterable[WriteStep]) -> Iterator[tuple[FileKey, str]]:
    """What these steps are about to leave in files, for `Ledger.intend`; also what the kernel resets with them."""
    for step in steps:
        yield (step.controller, step.path, step.file), step.text
        name = CATALOG[step.knob].resets
        other = CATALOG[name] if name is not None else None
        file = other.file(step.version) if other is not None else None
        if other is not None and file is not None:
            yield (other.controller, step.path, file), other.default(step.version)


def is_ours(knob: Knob, version: Version, entry: LedgerEntry, ledger: Ledger, actual: str) -> bool:
    """Whether a file may hold this by our doing (``actual`` in normal form). Errors: `ValueError`."""
    ours = {knob.normal(text, version) for text in ledger.ours(entry)}
    if actual in ours:
        return True
    if not ours or not isinstance(knob.decode(actual, version), DeviceLimits):
        return False
    # Written disk by disk: between two of them it is part old, part new.
    known = [*ours, *(knob.normal(text, version) for text in (entry.original, entry.baseline) if text is not None)]
    return set(actual.splitlines()) <= {line for text in known for line in text.splitlines()}
