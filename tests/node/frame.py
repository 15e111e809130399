"""What the demo shows at one moment, as plain texts: the same for the live table and for lines in a log."""

import os
import re
from collections.abc import Mapping

from msgspec import Struct

from cgroupfs.cpuset import CpuSet
from tests.node.bypassd import View, Wanted
from tests.node.stage import PodLike
from tests.node.values import Values
from tests.node.workload import Latency

_DEDICATED = "dedicated"
_ORDER = (_DEDICATED, "shared", "system", "reclaimed", "reserved", "interrupt")
_DOMAIN = re.compile(r"\S+/(?=\S+=)")
"""What a mark's name begins with: everybody knows whose it is, and there is little room."""
_UNLIMITED = {-1, None, "max", "-1"}
_PERIOD_US = 100_000


class Cell(Struct, frozen=True, kw_only=True):
    """A value in the kernel, and what the agent wants there (None: nothing)."""

    actual: str
    wanted: str | None = None

    @property
    def met(self) -> bool:
        return self.wanted is not None and self.wanted == self.actual

    def __str__(self) -> str:
        if self.wanted is None:
            return self.actual
        return f"{self.actual} ✓" if self.met else f"{self.actual} → {self.wanted}"


class Row(Struct, frozen=True, kw_only=True):
    """One line of the table."""

    title: str
    pool: str
    pod_class: str
    source: str
    qos: str
    cpus: Cell
    quota: Cell
    weight: Cell
    progress: str
    online: bool


class Frame(Struct, frozen=True, kw_only=True):
    """All of one moment. Units: seconds; units of work per second."""

    label: str
    """Empty, or what every page must say (``FAKE KERNEL``)."""
    node: str
    phase: str
    step: str
    elapsed_s: float
    left_s: float
    rows: tuple[Row, ...]
    latency: Latency | None
    be_rate: float | None
    budget: str
    """What BE work may use now, as the agent says; empty without one."""
    pools: tuple[tuple[str, str], ...]
    """Name and CPUs of each pool, as the agent says."""
    agent: tuple[str, ...]


def budget_text(view: View | None) -> str:
    """The budget in per cent of one CPU."""
    return "" if view is None or view.budget_milli is None else f"{view.budget_milli / 10:.0f}% of one CPU"


def quota_text(percent: float | str | None) -> str:
    """A quota in per cent of one CPU."""
    if percent is None:
        return "none"
    return percent if isinstance(percent, str) else f"{percent:.0f}%"


def wanted_text(wanted: Wanted | None) -> str | None:
    """What the agent wants, in the words that `actual` is shown in."""
    if wanted is None:
        return None
    value = wanted.wanted
    if wanted.knob == "cpu.quota":
        number = int(value) if isinstance(value, str) and value.lstrip("-").isdecimal() else value
        if number in _UNLIMITED:
            return "none"
        return quota_text(100 * number / _PERIOD_US) if isinstance(number, int) else str(value)
    return "none" if value is None else str(value)


def row_of(pod: PodLike, values: Values, view: View | None, progress: str, *, online: bool) -> Row:
    """The line of one pod: its one container's CPUs and quota, and its own directory's weight.

    The latter decides between pods; a lone container's does not.
    """
    container = next(iter(pod.containers.values()), None)
    group = container.group if container is not None else ""
    wanted: Mapping[str, Wanted] = view.wanted.get(group, {}) if view is not None else {}
    seen = view.pods.get(pod.spec.uid) if view is not None else None
    above = os.path.dirname(group)
    of_pod: Mapping[str, Wanted] = view.wanted.get(above, {}) if view is not None else {}
    cpus = values.value(group, "cpu.set")
    return Row(
        title=f"{pod.spec.namespace}/{pod.spec.name}",
        pool=(seen.pool or "everywhere") if seen is not None else "-",
        pod_class=seen.pod_class if seen is not None else "-",
        source=_DOMAIN.sub("", seen.source) if seen is not None else "",
        qos=pod.spec.qos,
        cpus=Cell(actual=str(cpus) if isinstance(cpus, CpuSet) else "?", wanted=wanted_text(wanted.get("cpu.set"))),
        quota=Cell(actual=quota_text(values.quota_percent(group)), wanted=wanted_text(wanted.get("cpu.quota"))),
        weight=_weight(above, values, of_pod),
        progress=progress,
        online=online,
    )


def _weight(group: str, values: Values, wanted: Mapping[str, Wanted]) -> Cell:
    """A pod's weight; ``idle`` in the idle class, in which the kernel does not use it."""
    idle = wanted.get("cpu.idle")
    actual = "idle" if values.value(group, "cpu.idle") == 1 else str(values.value(group, "cpu.weight"))
    return Cell(actual=actual, wanted="idle" if idle is not None else wanted_text(wanted.get("cpu.weight")))


def directory_row(group: str, title: str, values: Values, view: View | None, progress: str) -> Row:
    """The line of a directory above the pods."""
    wanted: Mapping[str, Wanted] = view.wanted.get(group, {}) if view is not None else {}
    cpus = values.value(group, "cpu.set")
    return Row(
        title=title,
        pool="",
        pod_class="",
        source="",
        qos="",
        cpus=Cell(actual=str(cpus) if isinstance(cpus, CpuSet) else "?", wanted=wanted_text(wanted.get("cpu.set"))),
        quota=Cell(actual=quota_text(values.quota_percent(group)), wanted=wanted_text(wanted.get("cpu.quota"))),
        weight=Cell(actual=str(values.value(group, "cpu.weight")), wanted=wanted_text(wanted.get("cpu.weight"))),
        progress=progress,
        online=False,
    )


def pools_of(view: View | None, titles: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """The pools with CPUs, those of one container first, by the pod's title instead of its uid."""
    if view is None:
        return ()
    pairs = []
    for name in sorted(view.pools, key=lambda name: (_ORDER.index(name.partition("/")[0]), name)):
        first, _, rest = name.partition("/")
        uid = rest.partition("/")[0]
        shown = f"{first} {titles.get(uid, uid[:8])}" if first == _DEDICATED else name
        if view.pools[name]:
            pairs.append((shown, view.pools[name]))
    return tuple(pairs)


def pools_text(pools: tuple[tuple[str, str], ...]) -> str:
    """All of them in one line."""
    return ", ".join(f"{name} {cpus}" for name, cpus in pools)


def milliseconds(value: float | None) -> str:
    """A latency for people."""
    return "-" if value is None else f"{value:.1f} ms"


def agent_lines(view: View | None, starts: Mapping[str, bool | None], median_s: float | None) -> tuple[str, ...]:
    """What the agent says of itself, in at most four lines."""
    if view is None:
        return ("no agent is running",)
    before = sum(1 for start in starts.values() if start)
    text = f"{before} of {len(starts)} container starts had every setting before exec" if starts else "no starts yet"
    after = f"; signal to last write {median_s * 1000:.2f} ms (median)" if median_s is not None else ""
    problems = tuple(f"! {problem}" for problem in view.problems[:2])
    return (
        f"{view.mode}: BE budget {budget_text(view) or '-'} ({view.budget_reason or 'no reason given'})",
        f"{text}{after}",
        f"{view.files} files in the ledger; {view.rss_bytes / 2**20:.0f} MiB",
        *problems,
    )
