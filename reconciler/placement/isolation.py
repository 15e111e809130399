"""Isolation: an online pod with many more runnable threads than it requests gets CPUs of its own for a while. Pure.

Runnable threads are those that run or wait in a run queue, on average over a sample. A pod is locked in by several
samples in a row over the limits, and locked out after a while without one (`observe`). The caller keeps the state.

Source: Katalyst's isolation pools. It compares the containers' threads at one moment, and isolates whole pods as well.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, ClassVar, Final, NamedTuple

from msgspec import Meta, Struct
from msgspec.structs import replace

from reconciler.placement.seats import cpus_of
from state.cpu import PodIndicators, PodIsolation
from state.model import ContainerKind, Pod

PREFIX: Final = "isolation/"
SIGNALS: Final = frozenset({"cpu.use", "cpu.wait_milli"})
_STALE_S: Final = 15.0
_ROW: Final = 10
"""Samples further apart than so many times the smallest distance are not in a row."""
_Percent = Annotated[int, Meta(ge=0, le=100)]


class IsolationConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Online pods with many runnable threads get CPUs of their own."""

    enabled: Annotated[
        bool,
        Meta(description="give an online pod CPUs of its own while it has many more runnable threads than it requests"),
    ] = False
    cpus_percent: Annotated[_Percent, Meta(description="CPUs of isolated pods together, of the online pools' CPUs")] = (
        20
    )

    # Katalyst's: half more runnable threads than requested CPUs.
    over_percent: ClassVar[int] = 150
    # The same for large requests; either of the two is enough.
    over_milli: ClassVar[int] = 2000
    # One runnable thread disturbs no other pod.
    minimum_milli: ClassVar[int] = 1000
    # Where most pods would be isolated, isolation separates nothing.
    pods_percent: ClassVar[_Percent] = 50
    # A burst of one sample is over before its pod has moved.
    samples: ClassVar[int] = 3
    # So that the samples in a row last a quarter of a minute.
    sample_s: ClassVar[float] = 5.0
    # Each move costs caches; loads of online pods return within minutes.
    release_s: ClassVar[float] = 120.0


class IsolatedPods(NamedTuple):
    """CPUs by uid of the isolated pods; and those that are locked in, but do not fit."""

    sizes: Mapping[str, int]
    waiting: tuple[str, ...]


def isolation_pool(uid: str) -> str:
    """The name of an isolated pod's pool."""
    return f"{PREFIX}{uid}"


def runnable_milli(measured: PodIndicators | None) -> int | None:
    """Threads that ran or waited, in thousandths; None: unknown or too old."""
    if measured is None or measured.wait_milli is None or measured.use_milli is None:
        return None
    if max(measured.wait_milli.age_s, measured.use_milli.age_s) > _STALE_S:
        return None
    return round(measured.use_milli.value + measured.wait_milli.value)


def observe(
    pods: Iterable[Pod],
    indicators: Mapping[str, PodIndicators],
    before: Mapping[str, PodIsolation],
    now: float,
    config: IsolationConfig,
) -> dict[str, PodIsolation]:
    """The next state of these pods, by uid; none without a sample above the limits. Times: the view's clock."""
    states: dict[str, PodIsolation] = {}
    for pod in pods:
        measured, state = indicators.get(pod.uid), before.get(pod.uid)
        request, runnable = pod.request_milli, runnable_milli(measured)
        if not request:
            continue  # without a request there is nothing that its threads exceed
        limit = max(config.minimum_milli, min(request * config.over_percent // 100, request + config.over_milli))
        over = runnable is not None and runnable > limit
        if state is not None and state.isolated:
            following = _locked_in(state, now, config, over=over)
        elif over and measured is not None and measured.wait_milli is not None:
            following = _hit(state, now - measured.wait_milli.age_s, config)
        else:
            # An unknown sample is neither a hit nor the end of a row.
            following = state if runnable is None else None
        if following is not None:
            states[pod.uid] = following
    return states


def _locked_in(state: PodIsolation, now: float, config: IsolationConfig, *, over: bool) -> PodIsolation | None:
    if over:
        return state if state.calm_since is None else replace(state, calm_since=None)
    if state.calm_since is None or state.calm_since > now:  # later than now: the clock went back
        return replace(state, calm_since=now)
    return None if now - state.calm_since >= config.release_s else state


def _hit(state: PodIsolation | None, at: float, config: IsolationConfig) -> PodIsolation:
    if state is not None and 0 <= at - state.hit_at < config.sample_s:
        return state  # samples that count are at least this far apart
    in_a_row = state is not None and 0 <= at - state.hit_at <= _ROW * config.sample_s
    hits = state.hits + 1 if state is not None and in_a_row else 1
    return PodIsolation(hits=hits, hit_at=at, isolated=hits >= config.samples)


def admit(
    pods: Mapping[str, Pod],
    states: Mapping[str, PodIsolation],
    held: Iterable[str],
    fits: Callable[[Mapping[str, int]], bool],
    *,
    cpus: int,
    config: IsolationConfig,
) -> IsolatedPods:
    """Which of the pods that are locked in get CPUs, and how many. ``held``: the uids of those that have some.

    Each gets its limit in CPUs, else its request, as far as that fits beside all requests and below two bounds: a part
    of the CPUs, and a part of the pods. Otherwise it is in its pool. Pods that have such CPUs are first.

    ``fits``: whether all requests fit beside these; ``cpus``: of the online pools, for the bound.
    """
    most = cpus * config.cpus_percent // 100
    most_pods = len(pods) * config.pods_percent // 100
    first = frozenset(held)
    sizes: dict[str, int] = {}
    waiting: list[str] = []
    for uid in sorted(
        (uid for uid, state in states.items() if state.isolated), key=lambda uid: (uid not in first, uid)
    ):
        for size in sorted({cpus_of(limit_milli(pods[uid])), cpus_of(pods[uid].request_milli)}, reverse=True):
            following = {**sizes, uid: size}
            if len(following) <= most_pods and sum(following.values()) <= most and fits(following):
                sizes = following
                break
        else:
            waiting.append(uid)
    return IsolatedPods(dict(sorted(sizes.items())), tuple(sorted(waiting)))


def limit_milli(pod: Pod) -> int:
    """A pod's limit in thousandths of a CPU, at least its request; its request where some container has none."""
    passing = {ContainerKind.INIT, ContainerKind.EPHEMERAL}
    limits = [container.limits.cpu_milli for container in pod.members if container.kind not in passing]
    request = pod.request_milli
    if any(limit is None for limit in limits):
        return request
    return max(request, sum(limit for limit in limits if limit is not None))
