"""Measures what online pods wait for a CPU, attributes it, and runs the harm law: ten times a second while BE works.

While BE work sleeps it measures once a second, to learn what each pod waits without BE work.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Final, Protocol, final

from cgroupfs.cpuset import EMPTY, CpuSet
from cgroupfs.usage import UsageReader
from reconciler.control.reconciler import Reconciler
from reconciler.policies import harm
from reconciler.policies.budget import BudgetConfig
from reconciler.policies.harm import HarmSample, HarmState
from reconciler.policies.waiting import PodJudgement, PodWaiting, is_quiet, judge, quiet_since
from reconciler.runtime.cooperative import TimeSlice
from reconciler.runtime.workqueue import TICK
from reconciler.signals.cpu import UseBySide
from state.cpu import HarmReading, HarmTerms
from state.model import NodeView, Pod, PodClass, Pools
from state.pod_index import derived, index_of

if TYPE_CHECKING:
    from reconciler.signals.host_meter import HostVictim

_CHOOSE_S: Final = 1.0
"""Seconds between two choices of the pods that share CPUs with BE work."""
_MISSED_S: Final = 1.0
"""Samples that are missing for less are not reported: the law does not rise meanwhile."""
_LIMITED: Final = 0.9
"""BE work that uses this part of its ceiling would use more."""
_LONGEST_S: Final = 5.0
"""Longer between two rounds: what was withheld meanwhile is not known."""
_OUTSIDE_MOST: Final = 64
"""BE pods outside of the besteffort directory whose use is read; of more it is unknown."""


class WaitSource(Protocol):
    """Measures what pods wait; `OnlineWait` does. ``problem``: why nothing is known."""

    problem: str | None

    async def sample(
        self,
        pods: Mapping[str, Pod],
        first: Collection[str],
        listed: Mapping[str, Sequence[int]],
        *,
        most_pods: int,
        most_processes: int,
    ) -> dict[str, PodWaiting] | None: ...

    def close(self) -> None: ...


@final
class HarmWatch:
    """The harm law's loop, ten times a second."""

    def __init__(
        self,
        reconciler: Reconciler,
        usage: UsageReader,
        wait: Callable[[], WaitSource],
        hosts: "Callable[[], Mapping[str, HostVictim]]" = dict,
    ) -> None:
        """``wait`` makes the source when the law first needs it. ``hosts``: host workloads that are victims."""
        self._reconciler = reconciler
        self._hosts = hosts
        self._listed: dict[str, Sequence[int]] = {}
        self._usage = usage
        self._make = wait
        self._wait: WaitSource | None = None
        self._state: HarmState | None = None
        self._measured = False
        self._chosen: dict[str, Pod] = {}
        self._at = self._chosen_at = float("-inf")
        self._interval: tuple[HarmState | None, HarmTerms | None, float] = None, None, 0.0
        """The last result of `interval_s`, with the state and the terms that it is for."""
        self._chosen_of: tuple[NodeView | None, CpuSet] = None, EMPTY
        """The node and the CPUs of the law by which they were chosen."""
        self._pods: dict[str, PodJudgement] = {}
        self._used: tuple[float, int, int] | None = None
        """When BE work's use was read last; the counter of its directory, and the sum of all (ns)."""
        self._sums = UseBySide()
        self._quiet_since: float | None = None
        self.rounds = self.cuts = 0
        """Since the daemon's start."""
        self.withheld_s = 0.0
        """CPU-seconds since the daemon's start that stayed idle while BE work was limited by a cut."""

    @property
    def state(self) -> HarmState | None:
        """The law's state; None: it cannot be in force."""
        return self._state

    @property
    def problem(self) -> str | None:
        """Why online pods' waiting is unknown."""
        return self._wait.problem if self._state is not None and self._wait is not None else None

    @property
    def unknown(self) -> bool:
        """Whether it should be measured and is not."""
        return self._state is not None and self._state.unknown_since is not None

    def facts(self) -> dict[str, object] | None:
        """The law's state for people; None: it cannot be in force."""
        state = self._state
        if state is None:
            return None
        worst = max(self._pods, key=lambda uid: self._pods[uid].level, default=None)
        return {
            "ceiling_milli": state.ceiling_milli,
            "wall_milli": state.wall_milli,
            "pause_s": state.pause_s,
            "cuts": self.cuts,
            "comparing": state.comparison.until is not None,
            "pods": len(self._chosen),
            "worst_uid": _subject(worst),
            "worst_level": round(self._pods[worst].level, 2) if worst is not None else None,
            "problem": self.problem,
        }

    def config(self) -> BudgetConfig:
        return self._reconciler.policies.reclaimed.budget

    def decides(self, now: float) -> bool:
        """Whether the law's ceiling counts, instead of the idle buffer's."""
        state = self._state
        if state is None or not self._measured:
            return False
        return state.unknown_since is None or now - state.unknown_since <= self.config().unknown_hold_s

    def interval_s(self, now: float) -> float:
        pools, state = self._reconciler.pools, self._state
        terms = pools.harm if pools is not None else None
        if self._interval[0] is state and self._interval[1] is terms:
            return self._interval[2]
        config = self.config().harm
        if state is None or terms is None:
            return config.interval_s
        if terms.floor_milli >= terms.top_milli:
            # Nothing to cut.
            interval_s = max(config.interval_s, config.calm_interval_s)
        else:
            interval_s = harm.interval_s(state, terms.top_milli, now, config)
        self._interval = state, terms, interval_s
        return interval_s

    def is_calm(self, now: float) -> bool:
        """Whether BE work has all that it may, and has had it for a while without harm: the rounds are rarer, too."""
        pools, state = self._reconciler.pools, self._state
        terms = pools.harm if pools is not None else None
        return (
            state is not None
            and terms is not None
            and terms.in_force
            and state.unknown_since is None
            and self.decides(now)
            and self.interval_s(now) > self.config().harm.interval_s
        )

    async def round(self, now: float) -> None:
        """Measure, step the law, and mark the node when the result differs."""
        # The sampler's tick may be due for another law.
        if 0.0 <= now - self._at < self.config().harm.interval_s / 2:
            return
        elapsed_s, self._at, slices = now - self._at, now, TimeSlice()
        pools = self._reconciler.pools
        terms = pools.harm if pools is not None else None
        if pools is None or terms is None or not self._reconciler.policies.reclaimed.enabled:
            self._stop()
            return
        config = self.config().harm
        self._choose(pools, terms, now)
        first = self._state.hurt if self._state is not None else ()
        if self._wait is None:
            self._wait = self._make()
        waits = await self._wait.sample(
            self._chosen,
            [uid for uids in first for uid in uids],
            self._listed,
            most_pods=config.pods_per_round,
            most_processes=config.processes_per_round,
        )
        # Half of the round's work: with many pods an online task that waits for this CPU runs in between.
        await slices.checkpoint()
        if self._reconciler.pools is not pools:
            # Planned again meanwhile.
            pools = self._reconciler.pools
            terms = pools.harm if pools is not None else None
            if pools is None or terms is None:
                self._stop()
                return
        used = self._use(now)
        self.rounds += 1
        levels = self._levels(waits, used, terms, now) if waits is not None else None
        if self._state is None or not terms.in_force:
            since = self._state.unknown_since if self._state is not None else None
            # With BE work in the idle class the first guess may be all: harm takes it back within two samples.
            self._state = harm.start(terms.top_milli if self._state is None else pools.budget_milli)
            if levels is None and since is not None:
                self._state = harm.unknown(self._state, since)
        if terms.in_force and used is not None:
            self._withhold(used, self._state.ceiling_milli, terms.top_milli, elapsed_s)
        before = self._state.cuts
        self._state = harm.step(
            self._state,
            HarmSample(
                top_milli=terms.top_milli,
                floor_milli=terms.floor_milli,
                grain_milli=terms.grain_milli,
                used_milli=used,
                levels=levels,
                excused=self._excused(pools, used, now),
            ),
            now,
            config,
        )
        self._measured = self._measured or levels is not None
        cut = self._state.cuts != before
        self.cuts += cut
        self._publish(now, cut=cut)

    def _withhold(self, used: int, ceiling: int, top: int, seconds: float) -> None:
        """Count what a cut kept from BE work: idle CPU that it could have had. Milli-CPUs; ``seconds``: how long."""
        readings = self._reconciler.inventory.readings
        if readings.cpu is None or not 0.0 < seconds <= _LONGEST_S or used < _LIMITED * ceiling:
            return
        idle = 1000 * len(readings.topology.online) - readings.cpu.busy_milli
        self.withheld_s += max(0, min(top - ceiling, idle)) * seconds / 1000

    def close(self) -> None:
        if self._wait is not None:
            self._wait.close()
            self._wait = None

    def _stop(self) -> None:
        if self._state is not None:
            self._state, self._measured, self._used = None, False, None
            self.close()
            self._reconciler.inventory.take(harm=None)
            self._reconciler.dirty.mark(TICK)

    def _publish(self, now: float, *, cut: bool) -> None:
        state = self._state
        if state is None or not self._measured:
            return
        before = self._reconciler.inventory.readings.harm
        uid = state.cause if state.cuts else None
        pod = self._pods.get(uid or "") if cut else None
        waits, own = (before.waits_percent, before.own_percent) if before is not None else (0.0, 0.0)
        if pod is not None:
            waits, own = round(pod.waits.percent, 1), round(pod.expected, 1)
        since = state.unknown_since
        if since is not None and now - since < _MISSED_S:
            # Not a plan for each missing sample.
            since = None
        reading = HarmReading(
            ceiling_milli=state.ceiling_milli,
            unknown_since=since,
            cuts=state.cuts,
            grown=state.raised_at >= state.cut_at,  # a cut takes the last step back
            uid=_subject(uid),
            waits_percent=waits,
            own_percent=own,
            comparing=state.comparison.until is not None,
        )
        if reading != before:
            # Its ceiling from now on, not the idle buffer's.
            self._reconciler.inventory.take(harm=reading, reclaimed_ceiling_milli=None)
            self._reconciler.dirty.mark(TICK)

    def _choose(self, pools: Pools, terms: HarmTerms, now: float) -> None:
        """The online pods and the host workloads that share CPUs with BE work."""
        from reconciler.signals.pod_cpus import pod_cpus

        view, cpus = self._reconciler.view, terms.cpus
        if now - self._chosen_at < _CHOOSE_S or view is None:
            return
        self._chosen_at, every = now, self._hosts()
        if view is self._chosen_of[0] and cpus == self._chosen_of[1] and not (every or self._listed):
            return
        self._chosen_of = view, cpus
        self._chosen = {
            uid: pod
            for uid, pod in self._reconciler.inventory.pods.items()
            if pod.pod_class.online and pod.containers and pod_cpus(pod, view, pools) & cpus
        }
        hosts = {uid: host for uid, host in every.items() if not host.cpus or host.cpus & cpus}
        self._listed = {uid: host.pids for uid, host in hosts.items()}
        self._chosen |= {uid: host.pod for uid, host in hosts.items()}
        self._pods = {uid: self._pods.get(uid) or PodJudgement() for uid in self._chosen}

    def _levels(self, waits: dict[str, PodWaiting], used: int | None, terms: HarmTerms, now: float) -> dict[str, float]:
        """The harm of each pod that was measured. Without BE work there is none, and what they wait is learned."""
        config = self.config().harm
        ceiling = self._state.ceiling_milli if self._state is not None else terms.top_milli
        low = is_quiet(used, ceiling, terms.floor_milli)
        since = self._quiet_since = quiet_since(self._quiet_since, now, quiet=low)
        # What is waited while BE work falls asleep is not learned as waiting without it.
        quiet = since is not None and now - since >= config.settle_s
        levels: dict[str, float] = {}
        for uid, waiting in waits.items():
            if (before := self._pods.get(uid)) is not None:
                self._pods[uid] = pod = judge(before, waiting, now, config, quiet=quiet)
                levels[uid] = pod.level
        return levels

    def _use(self, now: float) -> int | None:
        """BE work's CPU since the last round, of pods outside of the besteffort directory too; None: unknown."""
        inventory = self._reconciler.inventory
        odd = derived(inventory.table, outside_of_their_class)
        within = self._usage.cpu_ns(inventory.besteffort)
        if within is None or len(odd) > _OUTSIDE_MOST:
            self._used = None
            return None
        used = {path: ns for path in odd if (ns := self._usage.cpu_ns(path)) is not None}
        _, total = self._sums.add({**used, inventory.besteffort: within}, "", inventory.besteffort, odd)
        before, self._used = self._used, (now, within, total)
        # A directory that was made again counts from 0.
        if before is None or now <= before[0] or within < before[1]:
            return None
        return round((total - before[2]) / (now - before[0]) / 1e6)

    def _excused(self, pools: Pools, used: int | None, now: float) -> bool:
        """Whether BE work has a start allowance, and uses more than its budget by it."""
        plan = self._reconciler.plan
        since = now - 2 * self.config().harm.interval_s
        allowed = plan is not None and (bool(plan.starts.pods) or plan.starts.at > since)
        return allowed and used is not None and used > pools.budget_milli


def outside_of_their_class(pods: Mapping[str, Pod]) -> Mapping[str, PodClass]:
    """By group path, the class of BE pods outside the besteffort directory, and of online pods inside it."""
    index = index_of(pods)
    return {pod.group.path: pod.pod_class for pod in (*index.outside, *index.beside)}


def _subject(uid: str | None) -> str | None:
    """A pod's uid, or a host workload's subject, without the group."""
    return uid.partition(" ")[0] if uid is not None else None
