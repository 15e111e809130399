"""Values written by other programs: who wrote them, whether to reassert ours, what is recorded and reported.

`WriteAttribution` records each file's last writer. `ForeignWrites` is a pure state machine per file: reassert, wait,
yield, or honour the write as a hold. `ForeignWriteHandler` combines both for one foreign value and records the result.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import Final, NamedTuple, Protocol, final

import trio
from msgspec import Struct

from cgroupfs.attribution import ObservedWrite, WriterKind, WriteWatch, watch_writes
from cgroupfs.hierarchy import Hierarchy
from cgroupfs.knobs import CATALOG
from cgroupfs.log import get_log
from cgroupfs.naming import parse
from reconciler.actuators.cgroup.compare import FileWrite
from reconciler.actuators.cgroup.foreign_rules import ForeignRules
from reconciler.actuators.cgroup.status import Alert, StatusTable
from reconciler.actuators.holds import file_target
from reconciler.runtime.format import duration
from reconciler.runtime.workqueue import NODE, DirtyKeys, files_key
from reconciler.sources.process_facts import process_facts
from state.entry import US, LedgerEntry
from state.ledger import Ledger
from state.model import Hold, SourceStatus
from state.setting_state import SettingState

_LOG: Final = get_log("conflict")
_PERSON: Final = "person"
_RUNTIME: Final = "runtime"
_KUBELET: Final = "kubelet"
_UNKNOWN: Final = "unknown"
_SYSTEMD: Final = WriterKind.SYSTEMD.value
_EXPECTED: Final = frozenset({_RUNTIME, _KUBELET})
"""Writers that write a file a few times in a container's life, also without opposing bypassd's value."""
_OWNERS: Final = frozenset({_KUBELET, _SYSTEMD})
"""Writers of a pod's own directory."""
_UPDATERS: Final = frozenset({_RUNTIME, _UNKNOWN})
"""Writers that may be a runtime in the middle of its update. Unknown: it exited, or the kernel reports no writers."""
_UPDATE_S: Final = 0.25
"""Longest recorded ``runc update``: 11 ms; on a busy machine many times that."""
_EVENT_GAP_S: Final = 1.0
"""systemd's writes with no longer pause between them belong to one event. A daemon-reload of 2,000 units is one."""
_MINUTE_S: Final = 60.0
_MAX_WRITERS: Final = 10_000
"""Directories whose writers are kept. Beyond, all are dropped: the writer of their values is unknown from then on."""
_DESCRIBE_S: Final = 1.0
_TOGETHER_S: Final = 0.01
"""A program that writes one file of a group writes others of it in the next milliseconds."""
_FILES: Final = frozenset(form.file for knob in CATALOG.values() for form in knob.forms.values())
"""The files whose writers are recorded: those of the catalog's knobs."""
_BOUNDS: Final = frozenset(
    CATALOG[knob].forms[version].file
    for knob in ("cpu.quota", "cpu.period", "cpu.set", "memory.max")
    for version in CATALOG[knob].forms
)
"""Files of limits and CPU sets, which `reconciler.control.record_check` compares with the runtime's records."""


class ConflictAction(StrEnum):
    """What the worker does about a foreign value."""

    REASSERT = "reassert"
    WAIT = "wait"
    YIELD = "yield"
    HOLD = "hold"


class ConflictDecision(NamedTuple):
    """The action, when to check again (monotonic seconds, None: no need), and the text for the event."""

    action: ConflictAction
    check_at: float | None
    text: str


_STATES: Final = {
    ConflictAction.WAIT: SettingState.WAITING,
    ConflictAction.HOLD: SettingState.HELD,
    ConflictAction.YIELD: SettingState.YIELDED,
}


class FileHistory(Struct):
    """The foreign writes of one file. Exists only for files with a foreign write, so it is small.

    ``minute``: since when ``reapplied`` counts systemd's writes (monotonic seconds).
    """

    rounds: list[float] = []
    minute: float = float("-inf")
    reapplied: int = 0
    until: float = 0.0
    last: ConflictAction = ConflictAction.REASSERT


@final
class ForeignWrites:
    """Decides, per file, about foreign values."""

    def __init__(self, rules: ForeignRules) -> None:
        self._rules = rules
        self._files: dict[tuple[str, str], FileHistory] = {}

    def use(self, rules: ForeignRules) -> None:
        """Decide by these from now on; running waits keep their end."""
        self._rules = rules

    def decide(
        self,
        key: tuple[str, str],
        writer: str,
        now: float,
        *,
        person: bool,
        expected: bool,
        reapplied: bool = False,
        fresh: bool = True,
    ) -> ConflictDecision:
        """Decide about one foreign value at ``key`` (group path, knob), written by ``writer`` as far as is known.

        The first is corrected at once, the next ones after 1, 2, 4 … seconds. After ``rounds`` of them within
        ``window_s`` bypassd yields: the file keeps the foreign value, an alert is sent, and the file is tried again
        after ``retry_yielded_s``. A value that a person set becomes a hold at once.

        ``expected`` marks a write that came with the runtime's signal, ``reapplied`` one by systemd without it. Not
        ``fresh``: this value was decided before and is unchanged: our own was refused, or its hold has ended.
        """
        rules = self._rules
        history = self._files.setdefault(key, FileHistory())
        # While a wait or yield lasts its decision is repeated, and nothing is counted.
        if history.until:
            if now < history.until:
                return ConflictDecision(history.last, history.until, f"written by {writer}")
            history.until = 0.0
            history.last = ConflictAction.REASSERT
            return ConflictDecision(ConflictAction.REASSERT, None, "wait over; reasserted")
        if not fresh:
            return ConflictDecision(ConflictAction.REASSERT, None, f"changed by {writer}; reasserted")
        if person:
            # The decision lasts as a `Hold`, which people can list and release, and which survives a restart. What is
            # written after its end is counted anew.
            history.rounds.clear()
            message = f"set manually by {writer}; treated as a hold"
            return ConflictDecision(ConflictAction.HOLD, now + rules.hold_person_s, message)
        if reapplied:
            # systemd writes all values of a unit again when one of its properties is set (the kubelet's systemd driver
            # does so to the besteffort slice each minute and at each pod that is added or removed), and those of every
            # unit at a daemon-reload (measured: docs/support.md). It opposes no value of ours, so this never ends in a
            # yield: tenants decide how many pods start and end, and would so lift the bound of all BE work.
            if now - history.minute >= _MINUTE_S:
                history.minute, history.reapplied = now, 0
            history.reapplied += 1
            if history.reapplied <= rules.systemd_per_minute:
                return ConflictDecision(ConflictAction.REASSERT, None, f"changed by {writer}; reasserted")
            message = f"changed {history.reapplied} times within a minute by {writer}; retry in "
            return self._until(history, ConflictAction.WAIT, now + rules.backoff_s, message + duration(rules.backoff_s))
        history.rounds = [at for at in history.rounds if now - at < rules.window_s]
        history.rounds.append(now)
        count = len(history.rounds)
        if count > rules.rounds:
            message = f"changed {count} times in {duration(now - history.rounds[0])} by {writer}; giving up"
            return self._until(history, ConflictAction.YIELD, now + rules.retry_yielded_s, message)
        # The kubelet's CPU manager (static policy from 1.22) updates a container once in its first ten seconds and at
        # each change of the default set: no delay. It counts all the same, so that the unconditional ten-second rewrite
        # of kubelets up to 1.21 ends in a yield.
        if expected or count == 1:
            return ConflictDecision(ConflictAction.REASSERT, None, f"changed by {writer}; reasserted")
        delay = min(rules.backoff_s * 2 ** (count - 2), rules.backoff_max_s)
        return self._until(
            history, ConflictAction.WAIT, now + delay, f"changed again by {writer}; retry in {duration(delay)}"
        )

    def _until(self, history: FileHistory, action: ConflictAction, until: float, message: str) -> ConflictDecision:
        history.last, history.until = action, until
        return ConflictDecision(action, until, message)

    def state(self, key: tuple[str, str], now: float) -> ConflictAction | None:
        """The decision in force for ``key`` (WAIT or YIELD), None if the value may be written."""
        history = self._files.get(key)
        return history.last if history is not None and now < history.until else None

    def forget(self, path: str) -> None:
        """Start again: the group no longer exists, or a person released the hold."""
        for key in [key for key in self._files if key[0] == path]:
            del self._files[key]

    def pending(self, now: float) -> float | None:
        """When the next wait ends (monotonic seconds), None if nothing waits."""
        times = [history.until for history in self._files.values() if history.until > now]
        return min(times, default=None)


class WriterLookup(Protocol):
    """The last observed writer of a file."""

    def last_writer(self, directory: str, file: str) -> tuple[str, str] | None:
        """(kind, process), None if no write was observed."""


@final
class ForeignWriteHandler:
    """Handles a foreign value: decided by `ForeignWrites`, recorded in the ledger, counted and reported."""

    def __init__(
        self,
        *,
        ledger: Ledger,
        rules: ForeignWrites,
        attribution: WriterLookup | None,
        statuses: StatusTable,
        alert: Alert,
        held: Callable[[Hold], None],
    ) -> None:
        """``held`` is called with the holds that result from a person's own writes."""
        self.writes: Counter[str] = Counter()
        """Foreign writes by the writer's kind."""
        self.yields = 0
        self.systemd_events = 0
        """Events in which systemd wrote its units' values again, however many files each reached."""
        self._systemd_at = float("-inf")
        self._unrecorded: dict[tuple[str, str], str] = {}
        """Foreign values of files that the ledger does not contain, in normal form."""
        self._updating: dict[tuple[str, str], float] = {}
        """Since when the runtime has been writing a file without its signal (monotonic seconds)."""
        self._ledger = ledger
        self._rules = rules
        self._attribution = attribution
        self._statuses = statuses
        self._alert = alert
        self._on_hold = held

    def may_reassert(self, work: FileWrite, entry: LedgerEntry | None) -> bool:
        """Decide about a foreign value; record, count and report it.

        ``entry`` None: the file held the wanted value before, and bypassd has never written it. If it does so now, the
        present value is the original.
        """
        now = time.monotonic()
        kind, process = self._writer_of(work)
        if kind in _UPDATERS and not self._is_recorded(work, entry) and self._mid_update(work, now):
            return False
        events = self.systemd_events
        fresh = self.record(work, entry)
        decision = self._rules.decide(
            work.place,
            process or kind,
            now,
            person=kind == _PERSON,
            expected=work.target.signalled or kind in _EXPECTED,
            reapplied=kind == _SYSTEMD and not work.target.signalled,
            fresh=fresh,
        )
        if fresh:
            # One event of systemd reaches many files: it is logged once.
            further = kind == _SYSTEMD and decision.action is ConflictAction.REASSERT and events == self.systemd_events
            log = _LOG.debug if further else _LOG.info
            log(decision.text, path=work.key[1], knob=work.knob.name, writer=kind, process=process)
        if decision.action is ConflictAction.REASSERT:
            return True
        if decision.action is ConflictAction.HOLD:
            until = time.time() + (decision.check_at or now) - now  # a hold ends by the wall clock
            self._on_hold(Hold(target=file_target(*work.place), reason="set manually", by=process, until=until))
        state = _STATES[decision.action]
        last = self._statuses.get(work.place)
        changed = last is None or last.state != state
        # The text of a repeated decision names the writer only.
        self._statuses.record(work, state, decision.text if last is None or changed else last.detail)
        if decision.action is not ConflictAction.WAIT and changed:
            yielded = decision.action is ConflictAction.YIELD
            self.yields += yielded
            if entry is not None:
                self._ledger.set_yielded(work.key, yielded=yielded, reason=decision.text)
            self._alert("yield" if yielded else "hold", decision.text, work.setting)
        return False

    def record(self, work: FileWrite, entry: LedgerEntry | None) -> bool:
        """Record a foreign value; False if it was recorded before."""
        if self._is_recorded(work, entry):
            return False
        kind, process = self._writer_of(work)
        if entry is None:
            self._unrecorded[work.place] = work.actual
        else:
            self._unrecorded.pop(work.place, None)
            self._ledger.saw(work.key, work.raw, writer=kind, process=process)
        self.writes[kind] += 1
        if kind == _SYSTEMD:
            now = time.monotonic()
            self.systemd_events += now - self._systemd_at > _EVENT_GAP_S
            self._systemd_at = now
        if entry is None:
            return True
        if kind in _OWNERS and work.target.container is None and work.target.pod_uid is not None:
            # The kubelet writes a pod's directory when it creates or resizes the pod, itself or, with its systemd
            # driver, by a property of the pod's slice: restore this value from now on.
            self._ledger.rebase(work.key, work.raw)
        if kind in _OWNERS and parse(work.key[1]) is None:
            # A group outside of kubepods is a unit of systemd, or what the kubelet reserves CPU for: it is their
            # configured value.
            self._ledger.rebase(work.key, work.raw)
        if kind == _RUNTIME and work.target.container is not None and not work.target.signalled:
            # An update by crun ends in no event and no record: what it has written is the value to restore.
            self._ledger.rebase(work.key, work.raw)
        return True

    def _is_recorded(self, work: FileWrite, entry: LedgerEntry | None) -> bool:
        """Whether this foreign value was recorded before, and is unchanged: ours was refused, or a hold has ended."""
        if entry is None:
            return self._unrecorded.get(work.place) == work.actual
        return (
            entry.writer != US and entry.seen is not None and work.knob.normal(entry.seen, work.version) == work.actual
        )

    def resolve(self, place: tuple[str, str]) -> None:
        """The file holds the wanted value again: the other writer has finished; the next write starts a new wait."""
        self._updating.pop(place, None)
        self._unrecorded.pop(place, None)

    def is_waiting(self, place: tuple[str, str], now: float) -> bool:
        """Whether a file keeps a foreign value for now (monotonic seconds)."""
        return place in self._updating or self._rules.state(place, now) is not None

    def next_end(self, now: float) -> float | None:
        """When the next such wait ends (monotonic seconds), None if nothing waits."""
        return self._rules.pending(now)

    def keep_waits(self, path: str, written: Callable[[str], bool]) -> None:
        """End the waits for the runtime for knobs of a group that are not ``written`` now: ended, held or shown."""
        for place in [place for place in self._updating if place[0] == path and not written(place[1])]:
            del self._updating[place]

    def forget(self, path: str) -> None:
        self._rules.forget(path)
        self.keep_waits(path, lambda _knob: False)
        for place in [place for place in self._unrecorded if place[0] == path]:
            del self._unrecorded[place]

    def _mid_update(self, work: FileWrite, now: float) -> bool:
        """True while the runtime may still be writing: it has written, and its signal was not received yet."""
        # runc's rename has ended the update: the fast path reacts to it.
        if work.target.signalled or work.target.container is None:
            self._updating.pop(work.place, None)
            return False
        # runc reads the shares back after writing them and fails the kubelet's update if they differ.
        since = self._updating.setdefault(work.place, now)
        # The same sum as for `recheck`: with another rounding it would be due before it has ended, for ever.
        if now >= since + _UPDATE_S:
            del self._updating[work.place]
            return False
        self._statuses.recheck(work, since + _UPDATE_S)
        self._statuses.record(work, SettingState.WAITING, "the runtime is writing")
        return True

    def _writer_of(self, work: FileWrite) -> tuple[str, str]:
        writer = self._attribution.last_writer(work.directory, work.key[2]) if self._attribution is not None else None
        if writer is not None:
            return writer
        return (_RUNTIME, "the runtime's update") if work.target.signalled else (_UNKNOWN, "")


@final
class WriteAttribution:
    """Records each file's last foreign writer, and marks the files of its pod. A component, and a `WriterLookup`.

    With fanotify every write on the node's hierarchies is observed with its process; without it, the directories that
    hold a managed file are watched and the writer remains unknown.
    """

    def __init__(
        self,
        hierarchy: Hierarchy,
        dirty: DirtyKeys,
        *,
        kubepods: str,
        owner: Callable[[str], str | None],
        ours: Callable[[str], bool],
        watch: Callable[..., WriteWatch] = watch_writes,
    ) -> None:
        """``owner``: the pod uid of a group (None: a directory above the pods). ``ours``: whether it is managed."""
        self._hierarchy = hierarchy
        self._dirty = dirty
        self._kubepods = kubepods
        self._owner = owner
        self._ours = ours
        self._make = watch
        self._watch: WriteWatch | None = None
        self._writers: dict[str, dict[str, tuple[str, str]]] = {}
        """By directory and file: a removed group is forgotten by its directories."""
        self._followed: set[str] = set()
        self.writes = 0
        self.lost = 0
        self.bounds_written = 0
        """Writes of a CPU set or limit, of a managed group or not, by another program than kubelet and runtime; with
        fanotify only."""
        self._last_logged = 0, float("-inf")

    def last_writer(self, directory: str, file: str) -> tuple[str, str] | None:
        """(kind, process) of the last foreign write of one file; None if none was observed."""
        if self._watch is not None:
            # The value may have been read before its event: take those that the kernel has queued, too.
            self._record(self._watch.take())
        return self._writers.get(directory, {}).get(file)

    def follow(self, path: str) -> None:
        """Watch this group: it has managed files from now on."""
        if path not in self._followed:
            self._followed.add(path)
            if self._watch is not None:
                self._for_each_mount(path, self._watch.follow)

    def forget(self, path: str) -> None:
        if path in self._followed:
            self._followed.discard(path)
            if self._watch is not None:
                self._for_each_mount(path, self._watch.forget)
        for mount in self._hierarchy.mounts():
            self._writers.pop(mount.path(path), None)

    def status(self) -> SourceStatus:
        """Whether writers are identified on this node."""
        problem = "not running" if self._watch is None else self._watch.problem
        return SourceStatus(
            name="write attribution",
            ok=problem is None,
            age_s=0.0,
            detail=problem or "fanotify identifies every writer",
        )

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        directories = [mount.directory for mount in self._hierarchy.mounts()]
        watch = self._watch = self._make(directories, files=_FILES, below=self._kubepods)
        try:
            for path in self._followed:
                self._for_each_mount(path, watch.follow)
            task_status.started()
            while True:
                self._record(await watch.next_batch())
        finally:
            self._watch = None
            watch.close()

    def _record(self, batch: Iterable[ObservedWrite]) -> None:
        for write in batch:
            self.writes += 1
            if write.lost:
                self.lost += 1
                self._dirty.mark_all("lost writes")
                continue
            # Without a pid the kernel reports no writers: bypassd's own write would count.
            if write.file in _BOUNDS and write.writer.pid and write.writer.kind.value not in _EXPECTED:
                self.bounds_written += 1
            if write.group and self._ours(write.group):
                if len(self._writers) > _MAX_WRITERS:
                    self._writers.clear()
                directory = write.directory + write.group
                if write.writer.person:
                    self._describe(write)
                self._writers.setdefault(directory, {})[write.file] = (write.writer.kind.value, str(write.writer))
                uid = self._owner(write.group)
                self._dirty.mark(NODE if uid is None else files_key(uid), within_s=_TOGETHER_S)

    def _describe(self, write: ObservedWrite) -> None:
        """Log which process of a person wrote, once per process and at most once a second: it may exit soon."""
        now = time.monotonic()
        if write.writer.pid == self._last_logged[0] or now - self._last_logged[1] < _DESCRIBE_S:
            return
        self._last_logged = write.writer.pid, now
        for facts in process_facts([write.writer.pid]):
            fields = {"pid": facts.pid, "name": facts.name, "command": facts.command, "uid": facts.uid}
            age_s = round(facts.age_s or 0.0, 1)
            _LOG.info("written by a person", path=write.group, file=write.file, age_s=age_s, **fields)

    def _for_each_mount(self, path: str, call: Callable[[str, str], None]) -> None:
        for mount in self._hierarchy.mounts():
            call(mount.directory, path)
