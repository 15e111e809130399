"""Looks at one group's files and says which are to be written, and how every wanted setting stands.

Reads, compares, and applies what stands against a write: a hold, observe mode, another writer, a wait after a refusal.
It writes nothing and never waits.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, final

from msgspec import Struct

from cgroupfs.cpuset import CpuSet
from cgroupfs.errors import CgroupGoneError, cgroup_error
from cgroupfs.files import REAL, FileOps
from cgroupfs.hierarchy import Hierarchy
from cgroupfs.knobs import CATALOG, Knob
from cgroupfs.probe import offered
from reconciler.actuators.compare import Found, Move, compare
from reconciler.actuators.putback import put_back
from reconciler.actuators.resets import Located, forgotten, muted
from reconciler.actuators.spec import foretold, without_us
from reconciler.foreign import Answer, ForeignWrites
from reconciler.holds import file_target, holding
from state.entry import US, Entry, FileKey
from state.ledger import Ledger
from state.model import Container, GroupRef, Hold, Phase, Setting

if TYPE_CHECKING:
    from cgroupfs.codecs import Value

_LOG: Final = logging.getLogger(__name__)
_PERSON: Final = "person"
_EXPECTED: Final = frozenset({"runtime", "kubelet"})
_WAITING: Final = frozenset({"waiting", "yielded"})
_RUNTIME: Final = "runtime"
_KUBELET: Final = "kubelet"
_UPDATE_S: Final = 0.25
"""Longest recorded ``runc update``: 11 ms; on a busy machine many times that."""
_RETRY_S: Final = 1.0
_RETRY_MAX_S: Final = 60.0
_BANDWIDTH: Final = ("cpu.period", "cpu.burst")


class Target(Struct, frozen=True, kw_only=True):
    """One group, and all that is wanted there, by knob: settings of ours that are not among them are taken back.

    ``signalled``: the runtime has just written (its signal came), so a foreign value is its doing and expected.
    """

    group: GroupRef
    settings: Mapping[str, Setting] = {}
    pod_uid: str | None = None
    container: Container | None = None
    signalled: bool = False

    @property
    def creating(self) -> bool:
        """True while what is written would be lost: the runtime has not written its own values yet."""
        return self.container is not None and self.container.phase is Phase.CREATING


class Standing(NamedTuple):
    """How one wanted setting stands, for ``diff``, ``explain`` and the live table.

    ``state``: in place, written, would write, prepared, waiting, held, yielded, refused, missing (no such file here),
    not recorded (the store cannot take the original), blocked (a rule of the kernel). Texts are the kernel's; ``at``
    is wall-clock seconds.
    """

    setting: Setting
    state: str
    wanted: str
    actual: str | None
    detail: str
    at: float


class _Retry(NamedTuple):
    """When a refused file is tried again (monotonic; 0.0: at the next look), with the wait that led there."""

    at: float
    delay_s: float
    text: str
    pod_uid: str | None


class Attribution(Protocol):
    """Who wrote a file last, as far as anybody saw."""

    def last_writer(self, directory: str, file: str) -> tuple[str, str] | None:
        """(kind, process), None when nobody was seen."""


class Work(NamedTuple):
    """One file that is about to be written. ``raw`` is its text as read, ``actual`` the same in normal form."""

    target: Target
    knob: Knob
    version: int
    directory: str
    key: FileKey
    setting: Setting | None
    raw: str
    actual: str
    text: str
    move: Move

    @property
    def place(self) -> tuple[str, str]:
        """Group path and knob."""
        return self.key[1], self.knob.name


@final
class Judge:
    """See the module's text. Shared state of the actuator that outlives one look: standing, retries, known values."""

    def __init__(
        self,
        *,
        hierarchy: Hierarchy,
        ledger: Ledger,
        foreign: ForeignWrites,
        attribution: Attribution | None,
        files: FileOps = REAL,
        alert: Callable[[str, str, Setting | None], None],
        held: Callable[[Hold], None] = lambda _hold: None,
    ) -> None:
        """``held`` is told of the holds that a person's own writes make, so that they are remembered."""
        self.hierarchy = hierarchy
        self.versions = hierarchy.versions()
        self.enforce = True
        self.dry_policies: frozenset[str] = frozenset()
        self.holds: Mapping[str, Hold] = {}
        self.standing: dict[str, dict[str, Standing]] = {}
        """By group path, then knob."""
        self.actual: dict[tuple[str, str], Value] = {}
        self.retry: dict[str, dict[str, _Retry]] = {}
        """By group path, then knob: files that were refused."""
        self.foreign_writes: Counter[str] = Counter()
        self.yields = 0
        self.lost = False
        """The store was lost: what stands in a file now may be ours, and is taken for nobody's original."""
        self.unplugged: dict[int, float] = {}
        """When each CPU was last seen to go offline (wall clock): on v1 it leaves every cpuset, for good."""
        self.adoptable: list[Work] = []
        """Files that hold what is wanted, and not what the kubelet and the runtime would have left there."""
        self._updating: dict[tuple[str, str], float] = {}
        """Since when the runtime is seen writing a file without having signalled."""
        self._ledger = ledger
        self._foreign = foreign
        self._attribution = attribution
        self._files = files
        self._alert = alert
        self._held = held

    def look(self, target: Target) -> list[Work]:
        """The files of one group that are to be written now."""
        path = target.group.path
        for table in (self.standing, self.retry):
            here = table.get(path, {})
            for knob in [knob for knob in here if knob not in target.settings]:
                del here[knob]
        try:
            mute = self._muted(target)
            found = [
                self._want(target, CATALOG[name], setting)
                for name, setting in target.settings.items()
                if name not in mute
            ]
            found += [
                self._unwant(target, entry)
                for entry in self._ledger.group(path)
                if entry.knob not in target.settings and entry.knob not in mute
            ]
            work = [one for one in found if one is not None]
            work += [after for one in work if (after := self._after(one)) is not None]
            if any(one.knob.name == "cpu.quota" for one in work):
                self.learn(path, _BANDWIDTH)
        except CgroupGoneError:
            # Gone between discovery and use; its parent's event is on the way and takes care of the rest.
            return []
        return work

    def learn(self, path: str, knobs: tuple[str, ...]) -> None:
        """Read values that bound what may be written, without wanting anything of them."""
        for name in knobs:
            knob = CATALOG[name]
            version = self.versions.get(knob.controller)
            file = knob.file(version) if version else None
            if version is None or file is None:
                continue
            try:
                text = self._files.read(self.hierarchy.directory(knob.controller, path), file)
                self.actual[path, name] = knob.decode(text.rstrip("\n"), version)
            except (OSError, ValueError):
                self.actual.pop((path, name), None)

    def offered(self, path: str) -> frozenset[str]:
        """The knobs that this kernel has, told from a group's files; empty where there is no such group."""
        return offered(self.hierarchy, path, self._files)

    def unlearn(self, path: str) -> None:
        """Something does not fit below what is known of the groups above: have that read again before the next try."""
        while (path := path.rpartition("/")[0]) and path != "/":
            for knob in CATALOG:
                self.actual.pop((path, knob), None)

    def beside(self, work: Work) -> Work | None:
        """What a wanted value will make the kernel forget, as work that is not to be done: its original counts.

        None for knobs that reset no other, for their return to 0, and where the other file cannot be read.
        """
        if work.knob.resets is None or _is_zero(work):
            return None
        here = forgotten(self.hierarchy, self._files, work.key[1], work.knob)
        return None if here is None else self._work_of(work.target, here, None, here.raw)

    def memory_use(self, work: Work) -> int | None:
        """Bytes in use by a v2 group: a limit below it would kill. None when it cannot be read."""
        try:
            return int(self._files.read(work.directory, "memory.current"))
        except (OSError, ValueError):
            return None

    def stand(self, work: Work, state: str, detail: str = "", actual: str | None = None) -> None:
        """Note how a wanted setting stands."""
        if work.setting is not None:
            shown = work.actual if actual is None else actual
            standing = Standing(work.setting, state, work.text, shown, detail, time.time())
            self.standing.setdefault(work.key[1], {})[work.knob.name] = standing

    def stands(self, place: tuple[str, str]) -> Standing | None:
        """How the setting of one group and knob stands."""
        return self.standing.get(place[0], {}).get(place[1])

    def done(self, work: Work) -> None:
        """The file took its value: nothing to try again."""
        self.retry.get(work.key[1], {}).pop(work.knob.name, None)

    def refused(self, work: Work, reason: str, state: str = "refused", *, tell: bool = True) -> None:
        """Not possible now: say so once (unless somebody else does), and try again after a growing while."""
        retries = self.retry.setdefault(work.key[1], {})
        before = retries.get(work.knob.name)
        delay = min(before.delay_s * 2, _RETRY_MAX_S) if before is not None and before.text == work.text else _RETRY_S
        known = self.stands(work.place)
        retries[work.knob.name] = _Retry(time.monotonic() + delay, delay, work.text, work.target.pod_uid)
        self.stand(work, state, reason)
        if tell and (known is None or (known.state, known.detail) != (state, reason)):
            self._alert(state, reason, work.setting)

    def forget(self, path: str) -> None:
        """The group is gone; those below it are told one by one."""
        self._foreign.forget(path)
        self.standing.pop(path, None)
        self.retry.pop(path, None)
        for knob in CATALOG:
            self.actual.pop((path, knob), None)
            self._updating.pop((path, knob), None)

    def without_us(self, work: Work) -> str | None:
        """What the file would read had we never written it; None when nobody can tell."""
        _, path, file = work.key
        parent = self._parent_text(work.knob, path, file)
        return without_us(work.knob, work.version, path, work.target.container, parent)

    def without_ours(self, path: str, name: str) -> "Value":
        """What a file would hold had we not written it: its original while our value stands, else what was read last.

        None for "no limit", and where nobody can tell.
        """
        knob = CATALOG[name]
        version = self.versions.get(knob.controller)
        file = knob.file(version) if version else None
        if version is None or file is None:
            return None
        entry = self._ledger.get((knob.controller, path, file))
        if entry is None or entry.writer != US:
            return self.actual.get((path, name))
        try:
            return None if entry.restore_text is None else knob.decode(entry.restore_text, version)
        except ValueError:
            return None

    def may_write(self, setting: Setting) -> bool:
        """False for what is held, only practised, or only observed."""
        return self.enforce and setting.policy not in self.dry_policies and self._hold(setting) is None

    def _hold(self, setting: Setting) -> Hold | None:
        return holding(self.holds, path=setting.path, knob=setting.knob, pod_uid=setting.pod_uid)

    def next_look(self) -> float | None:
        """When the next wait or retry ends (monotonic seconds), None when there is none."""
        times = [one.at for retries in self.retry.values() for one in retries.values() if one.at]
        pending = self._foreign.pending(time.monotonic())
        return min([*times, pending] if pending is not None else times, default=None)

    def due(self, now: float) -> set[str | None]:
        """The pods (None: the directories above them) with a file to be looked at again. Each is told once."""
        uids: set[str | None] = set()
        for retries in self.retry.values():
            for knob, one in retries.items():
                if 0.0 < one.at <= now:
                    retries[knob] = one._replace(at=0.0)
                    uids.add(one.pod_uid)
        for path, here in self.standing.items():
            for knob, standing in here.items():
                if standing.state in _WAITING and self._foreign.state((path, knob), now) is None:
                    here[knob] = standing._replace(state="due")
                    uids.add(standing.setting.pod_uid)
        return uids

    # What another knob's value hides

    def _muted(self, target: Target) -> Collection[str]:
        """The knobs whose files of this group are left alone for now, wanted or not; noted where they are wanted."""
        path = target.group.path
        found = muted(self.hierarchy, self._ledger, self._files, path, target.settings)
        for name, by in found.items():
            if (setting := target.settings.get(name)) is not None:
                standing = Standing(setting, "in place", "", None, f"counts once {by} ends", time.time())
                self.standing.setdefault(path, {})[name] = standing
        return found

    def _after(self, work: Work) -> Work | None:
        """What the kernel forgets with this very work, to be written right after: as wanted now, else as it was."""
        if work.knob.resets is None or not _is_zero(work):
            return None
        here = forgotten(self.hierarchy, self._files, work.key[1], work.knob)
        entry = self._ledger.get(here.key) if here is not None else None
        if here is None or entry is None:
            return None
        setting = work.target.settings.get(here.knob.name)
        if setting is not None and self.may_write(setting):
            text: str | None = here.knob.encode(setting.value, here.version)
        else:
            text = entry.seen if setting is not None and entry.writer == US else entry.restore_text
            setting = None
        return None if text is None else self._work_of(work.target, here, setting, text)

    @staticmethod
    def _work_of(target: Target, here: Located, setting: Setting | None, text: str) -> Work:
        move = Move.CHANGE if setting is not None else Move.RELEASE
        actual = here.knob.normal(here.raw, here.version)
        return Work(target, here.knob, here.version, here.directory, here.key, setting, here.raw, actual, text, move)

    # One wanted setting

    def _want(self, target: Target, knob: Knob, setting: Setting) -> Work | None:
        path = target.group.path
        version = self.versions.get(knob.controller)
        file = knob.file(version) if version else None
        if version is None or file is None:
            self._missing(setting, f"no {knob.controller} controller here that has {knob.name}")
            return None
        directory = self.hierarchy.directory(knob.controller, path)
        try:
            text = knob.encode(setting.value, version)
        except ValueError as exc:
            self._missing(setting, f"{setting.value!r} cannot be written: {exc}")
            return None
        wanted = knob.normal(text, version)
        try:
            raw = self._read(directory, file)
        except CgroupGoneError:
            if target.creating:
                # The cpu and memory directories come 6-20 ms after the cpuset's.
                spec = target.container.spec if target.container else None
                raw = foretold(knob, version, spec, self._parent_text(knob, path, file))
            elif self._files_of(directory) and file not in self._files_of(directory):
                self._missing(setting, f"this kernel has no {file}")
                return None
            else:
                raise
        actual = knob.normal(raw, version)
        self._remember((path, knob.name), knob, actual, version)
        key = (knob.controller, path, file)
        entry = self._ledger.get(key)
        if entry is not None and self.enforce:
            self._ledger.want(key, wanted, policy=setting.policy, reason=setting.reason)
        move = compare(entry, Found(actual, wanted, self._seen(entry, knob, version, actual), restore=None))
        if target.creating:
            # Whatever it reads, the runtime has yet to write: what counts is what its spec leads to. A cpuset is empty
            # for half a millisecond after its mkdir, until the runtime has copied the pod's.
            spec = target.container.spec if target.container else None
            raw = actual = foretold(knob, version, spec, raw or self._parent_text(knob, path, file))
            move = Move.NOTHING if actual == wanted else Move.CHANGE if entry is not None else Move.FIRST
        return self._admit(Work(target, knob, version, directory, key, setting, raw, actual, text, move), entry)

    def _admit(self, work: Work, entry: Entry | None) -> Work | None:
        """The work itself when it may be done now; None, and how it stands noted, when not."""
        setting = work.setting
        assert setting is not None
        if work.move is Move.NOTHING:
            self.done(work)
            self.stand(work, "in place")
            if self.lost and entry is None and self.may_write(setting) and self.without_us(work) != work.actual:
                self.adoptable.append(work)
            if entry is not None and entry.yielded:
                self._ledger.set_yielded(work.key, yielded=False, reason="it holds what is wanted again")
            return None
        hold = self._hold(setting)
        if hold is not None:
            if work.move is Move.FOREIGN and entry is not None:
                # Seen now, so that it is no news when the hold is over.
                self._note_foreign(work, entry)
            self.stand(work, "held", f"{hold.reason} (by {hold.by})")
            return None
        if not self.may_write(setting):
            self.stand(work, "would write", setting.reason)
            return None
        if work.move is Move.FOREIGN and not self._may_reassert(work, entry):
            return None
        retry = self.retry.get(work.key[1], {}).get(work.knob.name)
        if retry is not None and time.monotonic() < retry.at and retry.text == work.text:
            return None
        return work

    def _may_reassert(self, work: Work, entry: Entry | None) -> bool:
        """Decide about a foreign value; note it, count it, tell it."""
        assert entry is not None
        now = time.monotonic()
        kind, process = self._who(work)
        if kind == _RUNTIME and self._mid_update(work, now):
            return False
        fresh = self._note_foreign(work, entry)
        verdict = self._foreign.decide(
            work.place,
            process or kind,
            now,
            person=kind == _PERSON,
            expected=work.target.signalled or kind in _EXPECTED,
            fresh=fresh,
        )
        if fresh:
            _LOG.info(
                "%s %s: %s",
                *(work.key[1], work.knob.name, verdict.words),
                # Below one key: a record has a "process" of its own, and refuses to have it overwritten.
                extra={"fields": {"writer": kind, "process": process}},
            )
        if verdict.answer is Answer.REASSERT:
            return True
        if verdict.answer is Answer.HOLD:
            self._hold_by_hand(work, process, (verdict.again_at or now) - now)
        state = {Answer.WAIT: "waiting", Answer.HOLD: "held", Answer.YIELD: "yielded"}[verdict.answer]
        known = self.stands(work.place)
        self.stand(work, state, verdict.words if known is None or known.state != state else known.detail)
        if verdict.answer is not Answer.WAIT and (known is None or known.state != state):
            yielded = verdict.answer is Answer.YIELD
            self.yields += yielded
            self._ledger.set_yielded(work.key, yielded=yielded, reason=verdict.words)
            self._alert("yield" if yielded else "hold", verdict.words, work.setting)
        return False

    def _mid_update(self, work: Work, now: float) -> bool:
        """True while the runtime may still be at it: it has written, and its signal has not come yet.

        runc reads the shares back after writing them and fails the kubelet's update when they are not what it wrote.
        Its rename ends the wait (the hot lane answers it); a runtime that gives no signal is waited for a moment.
        """
        if work.target.signalled or work.target.container is None:
            self._updating.pop(work.place, None)
            return False
        since = self._updating.setdefault(work.place, now)
        if now - since >= _UPDATE_S:
            del self._updating[work.place]
            return False
        retries = self.retry.setdefault(work.key[1], {})
        retries[work.knob.name] = _Retry(since + _UPDATE_S, _RETRY_S, "", work.target.pod_uid)
        self.stand(work, "waiting", "the runtime is writing")
        return True

    def _note_foreign(self, work: Work, entry: Entry) -> bool:
        """Enter a value that is not ours; False when it has been entered before."""
        if not (entry.writer == US or entry.seen is None or work.knob.normal(entry.seen, work.version) != work.actual):
            return False
        kind, process = self._who(work)
        self._ledger.saw(work.key, work.raw, writer=kind, process=process)
        self.foreign_writes[kind] += 1
        if kind == _KUBELET and work.target.container is None and work.target.pod_uid is not None:
            # It writes a pod's directory when the pod is made or resized: that is what to restore to from now on.
            self._ledger.rebase(work.key, work.raw)
        return True

    def _hold_by_hand(self, work: Work, person: str, seconds: float) -> None:
        hold = Hold(target=file_target(*work.place), reason="set by hand", by=person, until=time.time() + seconds)
        self.holds = {**self.holds, hold.target: hold}
        self._held(hold)

    def _who(self, work: Work) -> tuple[str, str]:
        seen = self._attribution.last_writer(work.directory, work.key[2]) if self._attribution is not None else None
        if seen is not None:
            return seen
        return ("runtime", "the runtime's update") if work.target.signalled else ("unknown", "")

    # One file of ours where nothing is wanted any more

    def _unwant(self, target: Target, entry: Entry) -> Work | None:
        knob = CATALOG[entry.knob]
        version = self.versions.get(knob.controller)
        if version is None or not self.enforce or target.creating:
            return None
        if holding(self.holds, path=entry.path, knob=knob.name, pod_uid=entry.pod_uid) is not None:
            return None
        directory = self.hierarchy.directory(entry.controller, entry.path)
        raw = self._read(directory, entry.file)
        actual = knob.normal(raw, version)
        self._remember((entry.path, knob.name), knob, actual, version)
        seen = self._seen(entry, knob, version, actual)
        original = put_back(
            *(knob, version, entry, self._ledger),
            lambda group, file: self._read(self.hierarchy.directory(entry.controller, group), file),
        )
        restore = None if original is None else knob.normal(original, version)
        move = compare(entry, Found(actual=actual, wanted=None, seen=seen, restore=restore))
        if move is Move.DROP:
            self._ledger.restored(entry.key, raw)
        if move is not Move.RELEASE or original is None or knob.one_way:
            # What the kernel never takes back ends with its group; a restore says so.
            return None
        return Work(target, knob, version, directory, entry.key, None, raw, actual, original, move)

    # Reading

    def _seen(self, entry: Entry | None, knob: Knob, version: int, actual: str) -> str | None:
        """What stood there when we last looked; what the kernel has made of it since is nobody's write."""
        if entry is None or entry.seen is None:
            return None
        seen = knob.normal(entry.seen, version)
        if seen != actual and knob.name == "cpu.set" and version == 1:
            lost = CpuSet(cpu for cpu, at in self.unplugged.items() if at >= entry.written_at)
            if lost and CpuSet.parse(seen) - lost <= CpuSet.parse(actual) < CpuSet.parse(seen):
                return actual
        return seen

    def _read(self, directory: str, file: str) -> str:
        try:
            return self._files.read(directory, file).rstrip("\n")
        except OSError as exc:
            raise cgroup_error(f"{directory}/{file}", exc, "read") from exc

    def _files_of(self, directory: str) -> list[str]:
        try:
            return self._files.files(directory)
        except OSError:
            return []

    def _parent_text(self, knob: Knob, path: str, file: str) -> str | None:
        try:
            return self._read(self.hierarchy.directory(knob.controller, path.rpartition("/")[0] or "/"), file)
        except CgroupGoneError:
            return None

    def _remember(self, place: tuple[str, str], knob: Knob, text: str, version: int) -> None:
        try:
            self.actual[place] = knob.decode(text, version)
        except ValueError:
            self.actual.pop(place, None)

    def _missing(self, setting: Setting, why: str) -> None:
        standing = Standing(setting, "missing", "", None, why, time.time())
        self.standing.setdefault(setting.path, {})[setting.knob] = standing


def _is_zero(work: Work) -> bool:
    return work.knob.decode(work.text, work.version) == 0
