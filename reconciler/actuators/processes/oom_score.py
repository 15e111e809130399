"""Sets ``oom_score_adj`` of processes of pods, and restores it. An auxiliary actuator.

The original of a container is the value of its oldest process.

Source: proc(5) on oom_score_adj.
"""

import os
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Final, final

from cgroupfs.files import FileOps
from cgroupfs.hierarchy import Hierarchy
from reconciler.actuators.base import ActuatorContext, ActuatorKind, OfflineContext
from reconciler.actuators.processes.process_values import ProcessValueActuator, undo_offline
from reconciler.actuators.processes.value_records import ProcessValueKind, codec_of
from reconciler.signals.processes import PodProcesses
from state.entry import RestoreResult
from state.kinds import PROCESS
from state.memory import OOM_SCORE

FILE: Final = "oom_score_adj"
_NAME: Final = "oom_score"
_KIND: Final = ProcessValueKind(
    ledger=PROCESS,
    file=FILE,
    knob=OOM_SCORE,
    policy=_NAME,
    members="processes",
    part=attrgetter("oom_scores"),
    # It counts when memory runs out, which takes longer than some processes take to enter.
    early_s=(0.1, 0.5, 2.0),
)
CODEC: Final = codec_of(_KIND)


@final
class _Scores:
    """`MemberAccess`, by /proc."""

    def __init__(self, hierarchy: Hierarchy, root: str, files: FileOps) -> None:
        self._pod_processes = PodProcesses(hierarchy, files)
        self._proc = os.path.join(root, "proc")
        self._files = files

    def ids(self, path: str) -> Iterable[int]:
        return self._pod_processes.of_group(path)

    def value_of(self, number: int) -> int:
        return int(self._files.read(f"{self._proc}/{number}", FILE))

    def set_value(self, number: int, value: int) -> None:
        # The file belongs to its process's user: others need CAP_DAC_OVERRIDE. With CAP_SYS_RESOURCE this also sets the
        # minimum to which the process may return; without it no writer gets below that minimum.
        self._files.write(f"{self._proc}/{number}", FILE, str(value))


@final
class OomScores(ProcessValueActuator):
    name = _NAME

    def __init__(self, context: ActuatorContext) -> None:
        super().__init__(_KIND, _Scores(context.hierarchy, context.root, context.files), context)


def _undo(context: OfflineContext) -> Sequence[RestoreResult]:
    return undo_offline(_KIND, lambda hierarchy: _Scores(hierarchy, context.root, context.files), context)


ACTUATOR: Final = ActuatorKind(codecs={PROCESS: CODEC}, build=OomScores, undo=_undo)
