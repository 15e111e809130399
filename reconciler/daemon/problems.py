"""The one list of what is wrong with the daemon and the node, besides the sources: each kind is a condition.

A condition that is not ok is in ``status``, on the page, in the metrics and, once it lasts, an alert with a runbook
(`reconciler.alerts.agent_alerts`). A new kind is a row of `NodeProblems._own`; what a source or the store reports
itself is a row of `NodeProblems._reported`, which is in the list only.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Final, NamedTuple, final

from reconciler.actuators.base import AuxiliaryActuator
from reconciler.alerts.service import AlertService
from reconciler.control.loop import ControlLoop
from reconciler.control.record import NodeRecord
from reconciler.control.state_writer import StateWriter
from reconciler.control.writes import CgroupWrites
from reconciler.daemon.pod_sources import PodSources
from reconciler.daemon.sources import NodeSources
from reconciler.runtime.format import first_of
from reconciler.runtime.own_process import OwnProcess
from state.model import SourceStatus

ACTUATOR: Final = "actuator "
"""Before the name of an actuator of other files than cgroups'."""
_SHOWN: Final = 3
_LINES: Final = 20
"""Texts of one kind; tenants decide how many of some there are."""


class ProblemKind(NamedTuple):
    """One kind. ``texts``: of this moment, empty while nothing of it is wrong."""

    name: str
    texts: Callable[[], Iterable[str]]


@final
class NodeProblems:
    def __init__(
        self,
        record: NodeRecord,
        sources: NodeSources,
        writes: CgroupWrites,
        control: ControlLoop,
        alerts: AlertService,
        *,
        process: OwnProcess,
        keeper: StateWriter,
    ) -> None:
        ledger, judge = record.ledger, writes.judge
        self._own = (
            ProblemKind("own priority", lambda: _priority(process)),
            ProblemKind("own CPU group", lambda: _group(process)),
            ProblemKind("pod list", lambda: _entries(sources.pods)),
            ProblemKind("recorded originals", lambda: ledger.problems),
            ProblemKind("state files", lambda: _texts(record.store.copy_problem, ledger.intents_problem)),
            ProblemKind("reconcile pass", lambda: _texts(control.reconciler.problem)),
            ProblemKind("single objects", judge.errors.problems),
            ProblemKind("unreadable files", lambda: _unreadable(writes)),
            ProblemKind("alert sinks", _of(alerts)),
            ProblemKind("marks of pods", lambda: _marks(control)),
            *(ProblemKind(f"{ACTUATOR}{side.name}", _of(side)) for side in control.sides.all),
        )
        self._reported = (
            ProblemKind("store", lambda: _texts(keeper.problem, keeper.damage, _moved(record))),
            ProblemKind("checkpoints", lambda: _split(control.inventory.readings.kubelet.problem)),
        )
        """By their sources: the store has a kind of alert of its own."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(kind.name for kind in self._own)

    def conditions(self) -> list[SourceStatus]:
        return [_status(kind) for kind in self._own]

    def lines(self) -> list[str]:
        """Every text of every kind, a bounded number of each."""
        texts = [text for kind in self._reported for text in islice(kind.texts(), _LINES)]
        for kind in self._own:
            before = f"{kind.name.removeprefix(ACTUATOR)}: " if kind.name.startswith(ACTUATOR) else ""
            texts += [text if text.startswith(before) else before + text for text in islice(kind.texts(), _LINES)]
        return texts


def _status(kind: ProblemKind) -> SourceStatus:
    texts = list(islice(kind.texts(), _LINES))
    return SourceStatus(name=kind.name, ok=not texts, age_s=0.0, detail=first_of(texts, _SHOWN) or "none")


def _texts(*texts: str | None) -> Iterator[str]:
    return filter(None, texts)


def _split(text: str | None) -> Iterable[str]:
    return text.split("; ") if text else ()


def _priority(process: OwnProcess) -> Iterator[str]:
    if problem := process.priority.status.problem:
        yield f"priority: {problem}: on a busy node more containers start before their settings"


def _group(process: OwnProcess) -> Iterator[str]:
    if problem := process.group.status.problem:
        yield f"own CPU group: {problem}: the daemon's wake-ups delay online pods"


def _entries(pods: PodSources) -> Iterator[str]:
    """What the kubelet, the API server and the runtime list and bypassd cannot use."""
    for source in (pods.kubelet, pods.watch, pods.metadata):
        yield from source.problems if source is not None else ()


def _moved(record: NodeRecord) -> str | None:
    moved = record.store.quarantined
    return f"the store was damaged and was moved to {moved}" if moved else None


def _unreadable(writes: CgroupWrites) -> Iterator[str]:
    for status in writes.judge.statuses.unreadable_settings():
        yield f"{status.setting.path}: {status.setting.knob}: {status.detail}"


def _marks(control: ControlLoop) -> Iterator[str]:
    for pod in list(control.inventory.pods.values()):
        for problem in pod.classification.problems:
            yield f"{pod.title}: {problem}"


def _of(part: AuxiliaryActuator | AlertService) -> Callable[[], Iterable[str]]:
    def texts() -> Iterable[str]:
        return part.problems()

    return texts
