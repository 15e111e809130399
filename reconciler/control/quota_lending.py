"""Keeps the states of the two control laws that lend quota, passes readings to them, and passes on their loans.

The laws are pure and in `policies.quota_burst` and `policies.quota_turbo`; the worker writes. This module connects
them: which containers exist, what was read of them, and which pods have to be planned again. Nothing is kept over a
restart: an agent that starts lends nothing, so an earlier run's loans are taken back first.
"""

from collections.abc import Mapping
from typing import final

from cgroupfs.usage import UsageReader, grown
from reconciler.control.reconciler import Reconciler
from reconciler.policies import lending, quota_burst, quota_turbo
from reconciler.policies.base import PERIOD_US
from reconciler.policies.lending import QuotaBorrower
from reconciler.policies.quota_burst import BurstGuard, BurstSample, BurstState
from reconciler.policies.quota_turbo import TurboNode, TurboSample, TurboState
from reconciler.runtime.wakeup import EARLY
from reconciler.runtime.workqueue import loan_key
from reconciler.signals.cpu import CpuReading, LoadMeter
from reconciler.signals.groups import GroupSampler
from state.model import Pod

Borrowers = list[tuple[Pod, QuotaBorrower]]


@final
class QuotaLender:
    """Runs the laws of quota_burst and quota_turbo. Called by the sampler, on the loop's thread."""

    def __init__(self, reconciler: Reconciler, usage: UsageReader) -> None:
        self._reconciler = reconciler
        self._groups = GroupSampler(usage)
        self._load = LoadMeter()
        self._guard = BurstGuard()
        self.burst: dict[str, BurstState] = {}
        self.turbo: dict[str, TurboState] = {}
        self._looked_at = 0.0
        self._nobody = False
        """Quota turbo's last step found no container that may borrow: the next step is not urgent."""
        self._owners: dict[str, str] = {}
        """By group path of each loan, the uid of its pod."""

    def interval_s(self) -> float | None:
        """Quota turbo's interval; None when it is off, or when its last step had no container."""
        config = self._reconciler.policies.quota_turbo
        return config.interval_s if config.enabled and not self._nobody else None

    @property
    def has_borrowers(self) -> bool:
        """Whether quota burst found containers that may borrow, at its last step."""
        return bool(self.burst)

    def on_second(self, now: float) -> None:
        """Quota burst's step. The readings of groups and node are of this moment, or marked as old."""
        config = self._reconciler.policies.quota_burst
        pools, knowledge = self._reconciler.pools, self._reconciler.inventory
        turbo = self._reconciler.policies.quota_turbo.enabled
        borrowers: Borrowers = []
        if pools is not None and not turbo:
            borrowers = quota_burst.borrowers(knowledge.table, pools, config)
        if pools is None or not (config.enabled or borrowers):
            self.burst, self._guard = {}, BurstGuard()
            if not turbo:
                self._publish({}, [])
            return
        self._guard = quota_burst.guard(self._guard, knowledge.readings.cpu, pools, now, config.threshold_percent)
        cpus = len(pools.online_cpus)
        samples: dict[str, BurstSample] = {}
        for pod, borrower in borrowers:
            use = knowledge.readings.uses.get(borrower.path)
            # One reading is one step: what was read a second ago has had its answer.
            known = use if use is not None and use.age_s < use.interval_s / 2 else None
            samples[borrower.path] = BurstSample(
                borrower=borrower,
                percent=quota_burst.percent_of(pod, config),
                budget_s=quota_burst.budget_of(pod, config),
                cpus=cpus,
                use_milli=known.cpu_milli if known is not None else None,
                throttled=known.throttled if known is not None else None,
            )
        self.burst = quota_burst.step_all(self.burst, samples, self._guard, now, config)
        self._publish({path: state.quota_us for path, state in self.burst.items()}, borrowers)

    def evaluate(self, reading: CpuReading | None, now: float) -> None:
        """Quota turbo's step, when it is due. ``reading`` None: the node could not be read."""
        config = self._reconciler.policies.quota_turbo
        if not config.enabled:
            if self.turbo:
                self.turbo = {}
                self._groups.sample({})
                self._load.forget()
            self._nobody = False
            return
        if 0.0 <= now - self._looked_at < config.interval_s * EARLY:
            return
        self._looked_at = now
        borrowers = self._turbo_borrowers()
        self._nobody = not borrowers
        self._groups.sample({borrower.path: borrower.inode for _, borrower in borrowers})
        load = swing = None
        if reading is None:
            self._load.forget()
        else:
            load, swing = self._load.add(reading, config.swing_window_s)
        pools = self._reconciler.pools
        cpus = len(pools.online_cpus if pools is not None else self._reconciler.inventory.readings.topology.online)
        samples = {borrower.path: self._turbo_sample(borrower, now) for _, borrower in borrowers}
        node = TurboNode(cpus=cpus, load_percent=load, swing=swing)
        self.turbo = quota_turbo.step(self.turbo, samples, node, config)
        self._publish({path: state.quota_us for path, state in self.turbo.items()}, borrowers)

    def _turbo_borrowers(self) -> Borrowers:
        reconciler = self._reconciler
        if reconciler.pools is None:
            return []
        pods = reconciler.inventory.pods.values()
        return quota_turbo.borrowers(pods, reconciler.pools, reconciler.policies.quota_turbo)

    def _turbo_sample(self, borrower: QuotaBorrower, now: float) -> TurboSample:
        use = self._groups.current_of(borrower.path, now)
        moved = self._groups.moved(borrower.path)
        # One reading is one step: what was read before has had its answer.
        if use is None or moved is None or use.age_s >= use.interval_s / 2:
            return TurboSample(borrower=borrower)
        return TurboSample(
            borrower=borrower,
            use_milli=use.cpu_milli,
            hit=grown(moved.before.throttled_periods, moved.after.throttled_periods),
            throttled_ns=grown(moved.before.throttled_ns, moved.after.throttled_ns),
        )

    def _publish(self, quotas: Mapping[str, int], borrowers: Borrowers) -> None:
        """Hand on what is lent, pods' directories included, and mark the pods for which that changed."""
        lent: dict[str, int] = {}
        owners: dict[str, str] = {}
        loans: dict[str, list[tuple[QuotaBorrower, int]]] = {}
        for pod, borrower in borrowers:
            quota = quotas.get(borrower.path, borrower.limit_us)
            if quota > borrower.limit_us:
                lent[borrower.path], owners[borrower.path] = quota, pod.uid
                loans.setdefault(pod.group.path, []).append((borrower, quota))
                owners[pod.group.path] = pod.uid
        judge = self._reconciler.actuator.judge
        for path, made in loans.items():
            own = judge.value_before_agent(path, "cpu.quota")
            period = judge.control_files.actual.get((path, "cpu.period"))
            if isinstance(own, int):
                period_us = period if isinstance(period, int) and period > 0 else PERIOD_US
                lent[path] = lending.pod_quota_us(own, period_us, made)
        before, then = self._reconciler.inventory.readings.lent_us, self._owners
        if lent == before:
            return
        self._reconciler.inventory.take(lent_us=lent)
        self._owners = owners
        changed = {path for path in lent.keys() | before.keys() if lent.get(path) != before.get(path)}
        for uid in sorted({uid for path in changed for uid in (owners.get(path), then.get(path)) if uid is not None}):
            self._reconciler.dirty.mark(loan_key(uid))
