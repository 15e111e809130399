"""What the kernel has: each bound on one pod's CPU, from its containers up; and wanted settings against their files.

Read by this process and not by the daemon: it also works while the daemon is down, and costs the daemon nothing.
Control files of cgroups can be read by every user.

Units: thousandths of a CPU, seconds, bytes. Source: kernel documentation, scheduler/sched-bwc, scheduler/sched-stats.
"""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from cgroupfs.bounded import digits
from cgroupfs.codecs import DEFAULT_PERIOD_US, DeviceLimits, Value
from cgroupfs.cpuset import CpuSet
from cgroupfs.errors import AgentError, SourceError
from cgroupfs.files import REAL, FileOps
from cgroupfs.hierarchy import Hierarchy
from cgroupfs.knobs import CATALOG, SETS, Knob
from cgroupfs.usage import UsageCounters, UsageReader, rates_between
from reconciler.cli.document import Row
from reconciler.cli.exits import CliError, Exit
from reconciler.runtime import format as fmt

_MOST_THREADS: Final = 2000
_MOST_GROUPS: Final = 200
OWN_LIMIT: Final = "its own limit (resources.limits.cpu)"
OWN_SUM: Final = "its own limit (the sum of its containers)"
OTHERS: Final = "another program"
"""The owner of a quota that is neither bypassd's nor recorded for the pod: its text begins so."""
ROUNDED_MILLI: Final = 10
"""systemd rounds a quota up to 10 ms of CPU time in a second."""
_LEAST: Final = 0.005
"""Of the periods, or of a CPU: less than this is shown as none."""


class ChainGroup(NamedTuple):
    """One group. ``role``: container NAME, pod, QoS class or all pods.

    Of a container, ``recorded_milli``: the quotas that the runtime or the kubelet recorded for it, and
    ``recorded_cpus``: the CPU set in the runtime's record, empty: none. None: not known.
    """

    role: str
    path: str
    recorded_milli: tuple[int, ...] | None = None
    recorded_cpus: str | None = None


def chain(pod: Row) -> list[ChainGroup]:
    """The pod's containers, its directory, and the directories above it, in this order; the pause container is none."""
    path = pod["group"]
    groups = [
        ChainGroup(
            f"container {container['name'] or container['id'][:12]}",
            container["group"],
            None if (recorded := container.get("quota_recorded_milli")) is None else tuple(recorded),
            container.get("cpus_recorded"),
        )
        for container in pod.get("containers", ())
        if container["kind"] != "sandbox"
    ]
    groups.append(ChainGroup("pod", path))
    above = []
    while (path := path.rpartition("/")[0]) not in {"", "/"}:
        above.append(path)
    groups += [ChainGroup(_role_above(path), path) for path in above]
    return groups


class ChainSample(NamedTuple):
    """Counters of the groups at one moment, and the run-queue wait of the pod's threads."""

    at_s: float
    usage: Mapping[str, UsageCounters]
    waits: Mapping[str, int]


class PodLimits:
    """Reads one pod's chain of groups. Errors: `AgentError` when no hierarchy is mounted."""

    def __init__(self, pod: Row, root: str = "/", *, files: FileOps = REAL) -> None:
        self._hierarchy = Hierarchy.detect(root)
        self._files = files
        self._usage = UsageReader(self._hierarchy, ops=files)
        self._proc = f"{root.rstrip('/')}/proc"
        self._pod = pod["group"]
        self.groups = [*([] if "containers" in pod else self._containers()), *chain(pod)]

    def _containers(self) -> list[ChainGroup]:
        """The groups below the pod's, where the document has none: the state file knows no containers."""
        try:
            names = sorted(self._files.groups(self._hierarchy.trigger_directory(self._pod)))[:_MOST_GROUPS]
        except (OSError, ValueError):
            return []
        return [ChainGroup(f"container {name[:12]}", f"{self._pod}/{name}") for name in names]

    def sample(self) -> ChainSample:
        usage: dict[str, UsageCounters] = {}
        for group in self.groups:
            try:
                usage[group.path] = self._usage.read_cpu(group.path)
            except (AgentError, ValueError):
                continue
        return ChainSample(time.monotonic(), usage, dict(self._waits()))

    def _waits(self) -> Iterator[tuple[str, int]]:
        """Nanoseconds in a run queue, by thread; none where the kernel or this user's rights show none."""
        left = _MOST_THREADS
        paths = [group.path for group in self.groups if group.role.startswith("container ")] or [self._pod]
        name = "tasks" if self._hierarchy.version(self._hierarchy.trigger) == 1 else "cgroup.threads"
        for path in paths:
            try:
                threads = self._files.read(self._hierarchy.trigger_directory(path), name).split()
            except (OSError, ValueError):
                continue
            for thread in threads[:left]:
                left -= 1
                try:
                    fields = self._files.read(f"{self._proc}/{thread}", "schedstat").split()
                except (OSError, ValueError):
                    continue
                if len(fields) == 3 and (waited := digits(fields[1])) is not None:
                    yield thread, waited

    def limits(self, path: str) -> Row:
        """What a group's files allow: CPUs, quota (and its text), weight, memory. None: no limit, or no such file."""
        quota, period = self._value(path, "cpu.quota"), self._value(path, "cpu.period")
        milli = None
        if isinstance(quota, int) and quota > 0:
            milli = round(1000 * quota / (period if isinstance(period, int) and period else DEFAULT_PERIOD_US))
        memory = self._value(path, "memory.max")
        return {
            "cpus": self._cpus(path),
            "quota_milli": milli,
            "quota_text": read_value(self._hierarchy, path, CATALOG["cpu.quota"], self._files),
            "weight": self._value(path, "cpu.weight"),
            # A larger number is cgroup v1's for no limit.
            "memory_bytes": memory if isinstance(memory, int) and memory < 1 << 60 else None,
        }

    def _value(self, path: str, name: str) -> object:
        knob = CATALOG[name]
        text, version = read_value(self._hierarchy, path, knob, self._files), self._hierarchy.version(knob.controller)
        try:
            return None if text is None or version is None else knob.decode(text, version)
        except ValueError:
            return None

    def _cpus(self, path: str) -> str | None:
        """The CPUs on which its tasks may run now."""
        v1 = self._hierarchy.version("cpuset") == 1
        try:
            directory = self._hierarchy.directory("cpuset", path)
        except AgentError:
            return None
        for name in ("cpuset.effective_cpus", "cpuset.cpus") if v1 else ("cpuset.cpus.effective",):
            try:
                if text := self._files.read(directory, name).strip():
                    return text
            except (OSError, ValueError):
                continue
        return None


def measured(limits: PodLimits, files: Sequence[Row], seconds: float) -> Row:
    """The whole chain: limits in force, whose each quota is, and the use, wait and throttling of ``seconds``.

    ``files``: the rows of the ledger.
    """
    before = limits.sample()
    time.sleep(seconds)
    after = limits.sample()
    ours = {row["path"]: row for row in files if row["knob"] == "cpu.quota"}
    groups: list[Row] = []
    for group in limits.groups:
        known = after.usage.get(group.path)
        if known is None:
            continue
        bound = limits.limits(group.path)
        seen = bound.pop("quota_text", None)
        if (row := ours.get(group.path)) is not None and seen is not None:
            # What the file has now: the daemon may not have read it since another program wrote it.
            ours[group.path] = row | {"seen": seen}
        groups.append(
            {
                "role": group.role,
                "path": group.path,
                **bound,
                **({} if group.recorded_cpus is None else {"recorded_cpus": group.recorded_cpus}),
                "quota_by": None,
                **_between(before.usage.get(group.path, known), known),
            }
        )
    unlimited = any(group["quota_milli"] is None for group in groups if group["role"].startswith("container "))
    recorded = {group.path: group.recorded_milli for group in limits.groups}
    for row in groups:
        if (milli := row["quota_milli"]) is not None:
            row["quota_by"] = owner(row["role"], ours.get(row["path"]), unlimited=unlimited)
            if row["quota_by"] == OWN_LIMIT:
                row["quota_by"] = _recorded(milli, recorded[row["path"]])
    earlier = before.waits
    waits = [max(0, waited - earlier[thread]) for thread, waited in after.waits.items() if thread in earlier]
    interval_s = after.at_s - before.at_s
    return {
        "seconds": interval_s,
        "groups": groups,
        "wait_milli": round(sum(wait for wait in waits if wait > 0) / interval_s / 1e6)
        if waits and interval_s > 0
        else None,
        "threads": len(after.waits),
    }


def _between(before: UsageCounters, after: UsageCounters) -> Row:
    rates = rates_between(before, after)
    return {
        "use_milli": rates.cpu_milli if rates is not None else None,
        "throttled_share": rates.throttled_share if rates is not None else None,
        "throttled_milli": rates.throttled_milli if rates is not None else None,
        "periods": after.periods,
        "throttled_periods": after.throttled_periods,
    }


def directories(before: Sequence[Row], after: Sequence[Row]) -> list[Row]:
    """The same of the directories above all pods, from two answers of the daemon (``podparents``)."""
    earlier = {row["path"]: row["counters"] for row in before}
    rows: list[Row] = []
    for row in after:
        path, counters = row["path"], row["counters"]
        if counters is None:
            continue
        known = UsageCounters(**counters)
        then = earlier.get(path)
        role = _role_above(path)
        rows.append(
            {
                "role": role,
                "path": path,
                "quota_milli": row["quota_milli"],
                "quota_by": owner(role, row["file"], unlimited=False) if row["quota_milli"] is not None else None,
                **_between(UsageCounters(**then) if then is not None else known, known),
            }
        )
    return rows


def _role_above(path: str) -> str:
    return "QoS class" if "/" in path[1:] else "all pods"


def owner(role: str, row: Row | None, *, unlimited: bool) -> str:
    """Who set a group's quota. ``row``: of the ledger, None: none; ``unlimited``: a container of the pod has no quota.

    Source: kubelet pkg/kubelet/cm/helpers_linux.go: a pod has the sum of its containers' quotas, and none where one of
    them has none, unless the pod has resources of its own; cm/qos_container_manager_linux.go and
    cm/node_container_manager_linux.go write no quota above the pods.
    """
    if row is not None and row["written_at"] and row["wanted"] == row["seen"]:
        return f"bypassd ({row['policy']})"
    if role.startswith("container "):
        return OWN_LIMIT
    if role != "pod":
        return f"{OTHERS} (a kubelet sets no quota there)"
    return f"the pod's own resources.limits.cpu, or {OTHERS}" if unlimited else OWN_SUM


def _recorded(milli: int, recorded: Sequence[int] | None) -> str:
    """Whose the quota of a container is, by what was recorded for it."""
    if recorded is None or any(number - 1 <= milli <= number + ROUNDED_MILLI for number in recorded):
        return OWN_LIMIT
    return f"{OTHERS} (the runtime recorded {fmt.cpu(recorded[0]) if recorded else 'none'})"


def throttlers(groups: Sequence[Row]) -> list[Row]:
    """The groups of the chain whose quota stopped tasks within the sample."""
    return [group for group in groups if (group["throttled_share"] or 0.0) >= _LEAST]


def above(groups: Sequence[Row]) -> list[Row]:
    """The directories above the pod that have a quota: what a freed pod is still bounded by."""
    return [
        group for group in groups if group["role"] in {"QoS class", "all pods"} and group["quota_milli"] is not None
    ]


def compare_settings(settings: Sequence[Row], titles: Mapping[str, str], root: str, store: str) -> list[Row]:
    """One row for every setting, as ``diff`` shows them. Errors: `CliError` when no hierarchy is mounted."""
    try:
        hierarchy = Hierarchy.detect(root)
    except SourceError as exc:
        raise CliError(f"{exc} (settings of {store})", Exit.UNREACHABLE) from exc
    # A knob that another one masks shows a substitute, and is written when that one ends.
    masks = {(row["path"], by.resets): by for row in settings if (by := CATALOG[row["knob"]]).resets is not None}
    return [_row(row, titles, hierarchy, masks.get((row["path"], row["knob"]))) for row in settings]


def read_value(hierarchy: Hierarchy, path: str, knob: Knob, files: FileOps = REAL) -> str | None:
    """A file's text in the kernel's normal form; None when no such file exists (no such group, or knob)."""
    version = hierarchy.version(knob.controller)
    name = knob.file(version) if version else None
    if version is None or name is None:
        return None
    try:
        return knob.normal(files.read(hierarchy.directory(knob.controller, path), name).rstrip("\n"), version)
    except (OSError, ValueError):
        return None


def wanted_text(knob: Knob, value: Value, version: int) -> str:
    """A wanted value as the kernel will show it. Errors: `ValueError`."""
    return knob.normal(knob.encode(value, version), version)


def _value_of(knob: Knob, stored: int | str | None) -> Value:
    """The value of a stored setting, whose sets and limits by disk are text. Errors: `ValueError`."""
    if not isinstance(stored, str):
        return stored
    return CpuSet.parse(stored) if knob.name in SETS else DeviceLimits.parse(stored)


def _row(fields: Row, titles: Mapping[str, str], hierarchy: Hierarchy, masked_by: Knob | None) -> Row:
    path, uid, cid = fields["path"], fields["pod_uid"], fields["container_id"]
    title = titles.get(uid, uid) if uid else path
    knob = CATALOG[fields["knob"]]
    version = hierarchy.version(knob.controller)
    actual = read_value(hierarchy, path, knob)
    text = str(fields["value"])
    state, detail = "missing", f"no {knob.controller} controller with {knob.name} on this node"
    if version is not None and knob.file(version) is not None:
        detail = ""
        try:
            text = wanted_text(knob, _value_of(knob, fields["value"]), version)
        except ValueError as exc:
            detail = f"the stored value cannot be written: {exc}"
        state = "unreadable" if detail else "in place" if actual == text else "differs"
        if actual is None:
            gone = not os.path.isdir(hierarchy.identity_directory(path))
            state, detail = ("gone", "its group is gone") if gone else ("missing", f"this kernel has no {knob.name}")
        elif masked_by is not None and read_value(hierarchy, path, masked_by) not in {None, "0"}:
            actual, state, detail = None, "in place", f"takes effect once {masked_by.name} ends"
    return {
        "place": f"{title}/{cid[:12]}" if cid else title,
        "path": path,
        "knob": knob.name,
        "control_file": (knob.file(version) if version is not None else None) or "",
        "wanted": text,
        "actual": actual,
        "state": state,
        "detail": detail,
        "policy": fields["policy"],
        "reason": fields["reason"],
    }
