"""A made node for the page's tests and pictures: 32 CPUs in two sockets, and as many pods as wanted.

What each part looks like is held to the daemon's own by `tests.page.test_made`. All numbers follow from the pods'
positions and the time since the start; none is random.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, final

from reconciler.runtime.cooperative import Steps
from reconciler.telemetry.metrics import MetricsSnapshot
from tests.fakes.web import FakePulse

CPUS: Final = 32
VIEWS: Final = ("classes", "podlist", "podparents", "cpumap", "nodehour")
SECTIONS: Final = (
    *("agent", "budget", "holds", "history", "sources", "alerts", "interference", "eviction", "problems", "files"),
)
_ONLINE: Final = ("checkout", "search", "cart", "prices", "login", "catalog", "stock", "mail", "images", "reviews")
_STATES: Final = {6: "held", 8: "yielded"}
BESTEFFORT: Final = "/kubepods/besteffort"
BURSTABLE: Final = "/kubepods/burstable"
_BATCH: Final = ("train", "index", "report", "transcode", "backfill")


def uid_of(number: int) -> str:
    return f"{number:08x}-1111-4111-8111-{number:012x}"


@final
class MadeNode:
    sections: Sequence[str] = SECTIONS
    views: Sequence[str] = VIEWS

    def __init__(self, pods: int = 30, names: Sequence[tuple[str, str]] = (), cpus: int = CPUS) -> None:
        """``names``: namespace and name of the first pods."""
        self.pulse = FakePulse()
        self.count = pods
        self.names = names
        self.cpus = cpus
        self.asked: list[frozenset[str]] = []
        self.began = time.monotonic()

    def not_ready(self) -> Sequence[str]:
        return ()

    def metrics_steps(self) -> Steps[MetricsSnapshot]:
        yield
        return MetricsSnapshot(version="1", mode="enforce", ready=True)

    async def events(
        self, after: int | None, run: str, since: float | None
    ) -> tuple[Mapping[str, object], Iterator[Mapping[str, object]], float]:
        del after, run, since
        return {"run": "made", "next": 1}, iter(()), 0.0

    def hour(self, uid: str) -> Mapping[str, object] | None:
        if uid not in {uid_of(number) for number in range(self.count)}:
            return None
        number = int(uid[:8], 16)
        use = [round(300 + 200 * math.sin((minute + 3 * number) / 7) + 60 * (minute % 5)) for minute in range(60)]
        return {
            "interval_s": 60.0,
            "age_s": 12.0,
            "wait": "schedstats",
            "use_milli": use,
            "throttled_milli": [max(0, value - 520) for value in use],
            "wait_milli": [round(value / 9) for value in use],
            "above_milli": {BESTEFFORT: [value // 3 for value in use]}
            if number % 5 in {3, 4} and number % 2 == 0
            else {},
        }

    async def parts(self, sections: Sequence[str], pod: str = "") -> tuple[Iterator[tuple[str, object]], float]:
        del pod
        wanted = frozenset(sections)
        self.asked.append(wanted)
        parts: dict[str, Callable[[], object]] = {
            "agent": self._agent,
            "budget": self._budget,
            "holds": self._holds,
            "history": self._history,
            "sources": self._sources,
            "alerts": lambda: {"sinks": [], "stored": [], "recent": []},
            "interference": self._interference,
            "eviction": self._eviction,
            "problems": self._problems,
            "files": self._files,
            "podlist": self._podlist,
            "podparents": self._podparents,
            "cpumap": self._cpumap,
            "nodehour": self._nodehour,
        }
        made = [("at", time.time()), *((name, part()) for name, part in parts.items() if name in wanted)]
        return iter(made), 0.0

    # Pods

    def name_of(self, number: int) -> tuple[str, str]:
        if number < len(self.names):
            return self.names[number]
        if self._class(number) == "reclaimed":
            return "batch", f"{_BATCH[number % len(_BATCH)]}-{number}"
        if self._class(number) == "system":
            return "kube-system", f"node-agent-{number}"
        return "shop", f"{_ONLINE[number % len(_ONLINE)]}-{number // len(_ONLINE)}"

    def _class(self, number: int) -> str:
        if number % 15 == 14:
            return "system"
        if number % 5 in {3, 4}:
            return "reclaimed"
        return "dedicated" if number in {1, 12} else "shared"

    def _podlist(self) -> list[dict[str, object]]:
        now = time.monotonic()
        rows: list[dict[str, object]] = []
        for number in range(self.count):
            kind = self._class(number)
            namespace, name = self.name_of(number)
            use = (0.05 + 0.17 * (number * 7 % 11)) * (4 if kind == "dedicated" else 1)
            # Half of the BE pods are in the BestEffort directory, whose quota is the budget; the others have their own.
            burstable = kind == "reclaimed" and number % 2 == 1
            own = 0.12 if burstable else 0.0
            throttled = {"reclaimed": own, "shared": 0.07 if number % 10 == 5 else 0.0}.get(kind, 0.0)
            directory = "besteffort" if kind == "reclaimed" and not burstable else "burstable"
            periods = int(now * 10)
            counters = {
                "at_s": now,
                "cpu_ns": int((now + math.sin(now / 9 + number)) * use * 1e9),
                "periods": periods,
                "throttled_periods": int(periods * throttled),
            }
            rows.append(
                {
                    "uid": uid_of(number),
                    "namespace": namespace,
                    "name": name,
                    "class": kind,
                    "pool": None if kind == "system" else kind,
                    "cpus": {"dedicated": "2-5" if number == 1 else "6-7", "reclaimed": "24-31", "system": "0-31"}.get(
                        kind, "8-23"
                    ),
                    "quota_milli": {
                        "reclaimed": 1500 if burstable else None,
                        "shared": 2000 if number % 2 else None,
                    }.get(kind),
                    "wait_percent": None if kind == "system" else (number * 13 % 23) / 2,
                    "state": _STATES.get(number, "managed" if kind in {"reclaimed", "dedicated"} else "unmanaged"),
                    "parent": "/kubepods" if kind == "dedicated" else f"/kubepods/{directory}",
                    "counters": {"": counters},
                }
            )
        return rows

    def _podparents(self) -> list[dict[str, object]]:
        """Of the BestEffort directory a third of the periods is throttled."""
        now = time.monotonic()
        rows: list[dict[str, object]] = []
        for path, quota_milli, share in (("/kubepods", None, 0.0), (BESTEFFORT, 9500, 1 / 3), (BURSTABLE, None, 0.0)):
            periods = int(now * 10)
            usage = {"cpu_ns": int(now * 6e9), "periods": periods, "throttled_periods": int(periods * share)}
            ours = {"policy": "reclaimed", "wanted": "950000", "seen": "950000", "written_at": time.time() - 60}
            file = ours if quota_milli else None
            rows.append({"path": path, "quota_milli": quota_milli, "file": file, "counters": {"at_s": now, **usage}})
        return rows

    def _cpumap(self) -> list[dict[str, object]]:
        rows: list[dict[str, object]] = []
        now = time.monotonic()
        for cpu in range(self.cpus):
            pools = ["shared"]
            if cpu < 2:
                pools = ["reserved"]
            elif cpu < 8:
                pools = ["dedicated"]
            elif cpu >= 24:
                pools = ["reclaimed"]
            elif cpu >= 20:
                pools = ["shared", "reclaimed"]
            owner = [uid_of(1)] if 2 <= cpu < 6 else [uid_of(12)] if 6 <= cpu < 8 else []
            rows.append(
                {
                    "cpu": cpu,
                    "socket": 2 * cpu // self.cpus,
                    "node": 2 * cpu // self.cpus,
                    "l3": cpu // 8,
                    "core": cpu // 2 * 2,
                    "thread": cpu % 2,
                    "kind": "P",
                    "isolated": False,
                    "pools": pools,
                    "pods": owner,
                    "busy_percent": round(48 + 40 * math.sin(now / 5 + cpu * 1.7)),
                }
            )
        return rows

    # The node

    def _budget(self) -> dict[str, object]:
        used = {"busy_milli": 19_400, "online_milli": 11_900, "reclaimed_milli": 6_800, "system_milli": 700}
        return {
            "budget_milli": 9_500,
            "used": used,
            "ceiling_milli": None,
            "quota_milli": {},
            "reasons": {},
            "claims": [],
        }

    def _nodehour(self) -> dict[str, object]:
        online, be, system, budget = [], [], [], []
        for point in range(360):
            online.append(round(10_500 + 3_000 * math.sin(point / 55) + 900 * math.sin(point / 3.1)))
            system.append(round(700 + 120 * math.sin(point / 7)))
            # At the end as in `_budget`: what is in the tiles is in the picture.
            budget.append(round(21_700 - 1.05 * online[-1]))
            squeeze = 0.35 if 205 <= point < 250 else 0.74
            be.append(round(budget[-1] * squeeze * (0.94 + 0.05 * math.sin(point / 2.3))) if point > 60 else 0)
        idle = [1000 * self.cpus - a - b - c for a, b, c in zip(online, be, system, strict=True)]
        return {
            "interval_s": 10.0,
            "age_s": 3.0,
            "online_milli": online,
            "reclaimed_milli": be,
            "system_milli": system,
            "idle_milli": idle,
            "budget_milli": budget,
        }

    def _agent(self) -> dict[str, object]:
        return {
            "version": "0.1.0",
            "node": "node-17",
            "mode": "enforce",
            "configured_mode": "enforce",
            "dry_run": ["eviction"],
            "ready": True,
            "cgroups": "v1",
            "kubelet_policy": "static",
            "window": {"name": "office", "until": time.time() + 3600, "then": "", "names": ["office"]},
        }

    def _sources(self) -> list[dict[str, object]]:
        names = ("cgroup tree", "kubelet", "checkpoints", "runtime", "cpu", "memory", "hotplug")
        return [
            {"name": name, "ok": name != "kubelet", "age_s": 1.0, "detail": "" if name != "kubelet" else "401"}
            for name in names
        ]

    def _problems(self) -> list[str]:
        return ["kubelet: 401: unauthorized with the token of /etc/bypassd/token; see docs/credentials.md"]

    def _holds(self) -> list[dict[str, object]]:
        if self.count < 7:
            return []
        return [
            {
                "target": f"pod:{uid_of(6)}",
                "reason": "latency test, ticket 4211",
                "by": "maria",
                "until": time.time() + 2400,
            }
        ]

    def _interference(self) -> dict[str, object]:
        if self.count < 10:
            return {}
        first, second = ("/".join(self.name_of(number)) for number in (2, 7))
        finding = {
            "rule": "run-queue",
            "victim": f"pod:{uid_of(2)}",
            "title": first,
            "verdict": "interfered",
            "for_s": 95.0,
            "resource": "cpu",
            "severity": 1.8,
            "gap": None,
            "evidence": ["waits 9.1 % of its time; 5 % is the limit"],
            "suspects": [
                {"uid": uid_of(3), "title": "/".join(self.name_of(3)), "score": 0.8, "reason": "uses its CPUs"}
            ],
        }
        steps = [
            {
                "words": f"squeeze {'/'.join(self.name_of(number))}",
                "response": "squeeze",
                "for_s": for_s,
                "dry_run": False,
            }
            for number, for_s in ((3, 80.0), (4, 1480.0), (8, 1100.0))
        ]
        suspect = {**finding, "verdict": "suspect", "title": second, "rule": "cpi", "for_s": 1510.0, "suspects": []}
        return {
            "findings": [finding, suspect],
            "ladder": [{"rule": "run-queue", "title": first, "steps": steps}],
            "signals": {"problems": {"llc.misses": "no hardware counter for it on this machine"}},
        }

    def _eviction(self) -> dict[str, object] | None:
        if self.count < 10:
            return None
        case = {
            "title": "/".join(self.name_of(9)),
            "cause": "memory.available below 5 %",
            "decided_at": time.time() - 1900,
            "outcome": "evicted",
        }
        return {"open": [], "ended": [case]}

    def _history(self) -> list[dict[str, object]]:
        if self.count < 10:
            return []
        group = f"/kubepods/burstable/pod{uid_of(8)}/{'c' * 64}"
        row = {
            "kind": "foreign",
            "path": group,
            "file": "cpu.cfs_quota_us",
            "writer": "kubelet",
            "process": "kubelet[812]",
        }
        ages = (40, 640, 1240, 1840, 2440, 3040)
        rows: list[dict[str, object]] = [{**row, "at": time.time() - age, "after": "-1"} for age in ages]
        given_up: dict[str, object] = {**row, "kind": "yield", "at": time.time() - 30, "after": None, "process": ""}
        return [given_up, *rows]

    def _files(self) -> list[dict[str, object]]:
        rows: list[dict[str, object]] = []
        for number in range(self.count):
            group = f"/kubepods/burstable/pod{uid_of(number)}/{'c' * 64}"
            for file, original, wanted in (("cpuset.cpus", "0-31", "8-23"), ("cpu.shares", "1024", "2048")):
                foreign = number == 8
                rows.append(
                    {
                        "kind": "cgroup",
                        "path": group,
                        "file": file,
                        "original": original,
                        "wanted": wanted,
                        "seen": original if foreign else wanted,
                        "writer": "kubelet" if foreign else "us",
                        "process": "kubelet[812]" if foreign else "",
                        "written_at": time.time() - 60 * number,
                    }
                )
        return rows
