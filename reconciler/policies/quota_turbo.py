"""quota turbo: throttled online containers get more quota ten times a second, out of the node's idle CPU time.

`step` is the control law, run by the sampler, which keeps the states; its loans reach the planner as
``NodeView.lent_us``. It differs from `quota_burst` in pace and purpose: over a window of a few seconds a container uses
no more on average than its limit, so it smooths bursts instead of giving CPU time away.

Source: openEuler rubik's quotaTurbo, in its order: slow fallback from the high mark on, fast fallback from the alarm
mark on, growth only while the node's load is steady. Only quotas that bypassd has changed are restored; rubik rewrites
all quotas of the node from the limits at each start.
"""

from collections.abc import Iterable, Mapping
from typing import Annotated, ClassVar, Final

from msgspec import Meta, Struct

from reconciler.policies import lending
from reconciler.policies.base import Policy, PolicyConfig
from reconciler.policies.lending import CPU_MILLI, QuotaBorrower, ceiling_us
from state.model import NodeView, Pod, Pools, Setting
from state.plan import NodePlan

NAME: Final = "quota_turbo"
ANNOTATION: Final = "volcano.sh/quota-turbo"
"""rubik's own mark of the pods that take part."""
SLOW: Final = 0.1
"""Of what is lent, given back in one tick at the alarm mark by those that were not throttled."""
_NS_PER_US: Final = 1000


class QuotaTurboConfig(PolicyConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which containers take part, and how far and how fast quotas move."""

    enabled: Annotated[
        bool,
        Meta(description='adjust quotas of pods with volcano.sh/quota-turbo: "true"; excludes quota_burst'),
    ] = False
    every_online_pod: Annotated[
        bool, Meta(description='all online pods with a quota take part, unless annotated "false"')
    ] = False
    high_percent: Annotated[
        int, Meta(ge=1, le=99, description="node's CPU use above which unused loans are returned slowly")
    ] = 60
    alarm_percent: Annotated[
        int, Meta(ge=2, le=100, description="node's CPU use above which loans are revoked at once")
    ] = 80

    # OpenEuler's: one period of the quota.
    interval_s: ClassVar[float] = 0.1
    # OpenEuler's step: of the node's CPUs.
    grow_percent: ClassVar[float] = 1.0
    # OpenEuler's: a node whose use varies by more is not lent on.
    swing_percent: ClassVar[float] = 10.0
    # OpenEuler's minute.
    swing_window_s: ClassVar[float] = 60.0
    # OpenEuler's: measurements over which a container's mean use remains within its limit.
    window_looks: ClassVar[int] = 60
    # A service that needs more for long has the wrong limit.
    ceiling_percent: ClassVar[int] = 200

    def __post_init__(self) -> None:
        # In rubik: a division by zero in each tick.
        if self.high_percent >= self.alarm_percent:
            raise ValueError(
                f"high_percent {self.high_percent} must be below alarm_percent {self.alarm_percent}: loans are "
                "returned slowly above the first and revoked above the second"
            )


class TurboNode(Struct, frozen=True, kw_only=True):
    """One sample of the node. ``load_percent``: busy share of its CPUs; ``swing``: its variation; None: unknown."""

    cpus: int
    # Of the last second: in 100 ms a kernel counts ten ticks of a CPU, and one tick of noise on a small node is more
    # than the swing that stops all growth. iowait is idle: in rubik a program that waits for a disk ends all loans.
    load_percent: float | None = None
    swing: float | None = None


class TurboSample(Struct, frozen=True, kw_only=True):
    """One container's use since the last sample; None: unknown.

    ``hit``: periods in which it was throttled; ``throttled_ns``: CPU time for which its run queues were stopped.
    """

    borrower: QuotaBorrower
    use_milli: int | None = None
    hit: int | None = None
    throttled_ns: int | None = None


class TurboState(Struct, frozen=True, kw_only=True):
    """One container's quota now, between its limit and the ceiling.

    ``saved``: for each of the last samples, what it used less than its limit (negative: more), thousandths of a CPU.
    """

    quota_us: int
    limit_us: int
    saved: tuple[int, ...] = ()


def step(
    states: Mapping[str, TurboState], samples: Mapping[str, TurboSample], node: TurboNode, config: QuotaTurboConfig
) -> dict[str, TurboState]:
    """One step for all containers of ``samples``, by group path; the state of any other container is dropped."""
    before = {path: _recorded(states.get(path), sample, config) for path, sample in sorted(samples.items())}
    # Thousandths of a CPU above the limit.
    lent = {
        path: (state.quota_us - state.limit_us) * CPU_MILLI / samples[path].borrower.period_us
        for path, state in before.items()
    }
    lent = _after_slow_fallback(lent, samples, node, config)
    lent = _after_fast_fallback(lent, node, config)
    for path, more in _growth(samples, node, config).items():
        lent[path] += more
    after: dict[str, TurboState] = {}
    for path, state in before.items():
        borrower = samples[path].borrower
        # With the next sample, too, the mean use over the window remains within the limit.
        most = min(
            ceiling_us(borrower.limit_us, borrower.period_us, config.ceiling_percent, node.cpus),
            borrower.limit_us + max(0, sum(state.saved)) * borrower.period_us // CPU_MILLI,
        )
        quota = borrower.limit_us + int(lent[path] * borrower.period_us / CPU_MILLI)
        after[path] = TurboState(
            quota_us=max(borrower.limit_us, min(quota, most)), limit_us=borrower.limit_us, saved=state.saved
        )
    return after


def _recorded(state: TurboState | None, sample: TurboSample, config: QuotaTurboConfig) -> TurboState:
    """The state with this sample's use in its window. A new or resized container has saved nothing yet."""
    borrower = sample.borrower
    if state is None or state.limit_us != borrower.limit_us:
        return TurboState(quota_us=borrower.limit_us, limit_us=borrower.limit_us)
    # An unknown use counts as all that the container had.
    use = sample.use_milli if sample.use_milli is not None else -(-state.quota_us * CPU_MILLI // borrower.period_us)
    # One sample less than the window: the next one's use, at most the quota, is the last of it.
    saved = (*state.saved, borrower.limit_milli - use)[-(config.window_looks - 1) :]
    return TurboState(quota_us=state.quota_us, limit_us=state.limit_us, saved=saved)


def _after_slow_fallback(
    lent: Mapping[str, float], samples: Mapping[str, TurboSample], node: TurboNode, config: QuotaTurboConfig
) -> dict[str, float]:
    """From the high mark on, an unthrottled container returns up to a tenth; on an unknown load, all of the loan."""
    share = SLOW
    if node.load_percent is not None:
        over = (node.load_percent - config.high_percent) / (config.alarm_percent - config.high_percent)
        share = min(1.0, max(0.0, over)) * SLOW
    # The last thousandth is returned with it: returning a tenth of it each time would never end.
    return {
        path: milli if samples[path].hit else max(0.0, milli * (1.0 - share) - (1.0 if share else 0.0))
        for path, milli in lent.items()
    }


def _after_fast_fallback(lent: Mapping[str, float], node: TurboNode, config: QuotaTurboConfig) -> dict[str, float]:
    """From the alarm mark on, what the node uses above it is taken from all loans, in proportion."""
    if node.load_percent is None or node.load_percent < config.alarm_percent:
        return dict(lent)
    over = (node.load_percent - config.alarm_percent) / 100 * node.cpus * CPU_MILLI
    return lending.rationed(lent, max(0.0, sum(lent.values()) - over))


def _growth(samples: Mapping[str, TurboSample], node: TurboNode, config: QuotaTurboConfig) -> dict[str, float]:
    """What is lent in addition: to each what it lacked per period, to all together at most the step and the room.

    Nothing while the load or its swing (a node observed for less than the window) is unknown.
    """
    if node.load_percent is None or node.swing is None or node.swing > config.swing_percent:
        return {}
    room = config.alarm_percent - node.load_percent
    if room < 1.0:
        return {}  # rubik's: too close to the alarm mark
    values = {
        path: sample.throttled_ns / sample.hit / (sample.borrower.period_us * _NS_PER_US) * CPU_MILLI
        for path, sample in samples.items()
        # Time may be counted in a sample after the period that it belongs to: the divisor is 0.
        if sample.hit and sample.throttled_ns and sample.use_milli is not None
    }
    return lending.rationed(values, min(config.grow_percent, room) / 100 * node.cpus * CPU_MILLI)


def takes_part(pod: Pod, config: QuotaTurboConfig) -> bool:
    """Whether a pod's containers may borrow: by its annotation, else by the config."""
    mark = pod.annotations.get(ANNOTATION)
    if mark is None:
        return config.every_online_pod
    return mark.strip().lower() == "true"


def borrowers(pods: Iterable[Pod], pools: Pools, config: QuotaTurboConfig) -> list[tuple[Pod, QuotaBorrower]]:
    """The containers that may borrow now."""
    if not config.enabled:
        return []
    return [(pod, borrower) for pod in pods if takes_part(pod, config) for borrower in lending.borrowers(pod, pools)]


def for_pod(pod: Pod, view: NodeView, plan: NodePlan, config: QuotaTurboConfig) -> list[Setting]:
    """The quotas of a participating pod's containers that hold a loan, and its directory's."""
    if not takes_part(pod, config):
        return []
    return lending.wanted(pod, view, plan.pools, policy=NAME, percent=config.ceiling_percent)


POLICY = Policy(
    name=NAME,
    summary="adjusts quotas of marked online pods to their bursts, from the node's idle CPU",
    config_type=QuotaTurboConfig,
    precedence=36,
    pod=for_pod,
)
