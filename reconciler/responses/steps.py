"""The next change for a victim: which response, on which suspect, how large. Pure; None where nothing is left to try.

Sizes follow the gap: the victim's shortage is taken from the most probable suspect, and not a fixed amount. Where that
has no effect, the gap counts as unknown, and the squeeze is enlarged once. It is repeated on the same suspect while it
helps and leaves something to take; then the next suspect follows, then the next response. Source for the order within a
resource: PARTIES (one change at a time, remembered when useless), CPI² (cap the best-correlated batch task).
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from enum import StrEnum
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from reconciler.responses.config import LadderConfig
from reconciler.runtime import format as fmt
from reconciler.signals.history import History
from state.evidence import NODE, ContendedResource, PodSnapshot, RuleVerdict, SampleFrame, Suspect, signature
from state.measures import Response
from state.model import PodClass

SIGNALS: Final = ("be.budget", "be.use", "cpu.use", "memory.use", "disk.read", "disk.write")
"""The sizes of steps follow from these."""
_MOST_OF_IT: Final = 0.5
_LEAST_CPU_MILLI: Final = 50
"""With less a squeezed pod cannot even end in its grace period."""
_LEAST_MEMORY_BYTES: Final = 64 << 20
"""With less a language's runtime thrashes instead of giving way."""
_LEAST_DISK_BPS: Final = 1 << 20
"""With less a pod cannot even write its last state; per disk, for reads and for writes."""
_LEAST_STEP: Final = 0.1
"""Of the suspect's use: smaller squeezes have no effect that can be distinguished from noise."""
_UNKNOWN_STEP: Final = 0.5
"""Of the suspect's use: a squeeze where the shortage has no size, or a smaller one had no effect."""
_PARTITIONS: Final = (50, 25, 10)
"""Percent of its share of the caches that BE keeps, step by step, to the smallest share that hardware accepts."""
_DISK_KNOBS: Final = frozenset({"io.max", "blkio.read_bps"})


class Dimension(StrEnum):
    """What a step bounds; decides the unit of its amount."""

    BUDGET = "budget"
    CPU = "CPU"
    MEMORY = "memory"
    DISK = "disk"
    CACHE = "cache"
    RUN = "running"
    NODE = "node"


_NOT_EVALUATED: Final = frozenset({Response.HOLD, Response.CLOSE})
"""They keep interference from growing, so that no improvement proves them."""
_LACKING: Final = {Dimension.CPU: ContendedResource.CPU, Dimension.MEMORY: ContendedResource.MEMORY}
"""The squeezes whose unit is that of the gap."""


class ResponseStep(Struct, frozen=True, kw_only=True):
    """One change in force for one victim.

    ``amount``: what is left to the suspect: thousandths of a CPU, bytes, bytes/s, percent of its share of the caches;
    for a freeze, seconds. ``before``: what it had, same unit. ``severity``: the victim's severity when the step was
    made. ``judged``: it helped, or is not evaluated. ``key``: the key under which it is remembered if it did not help.

    An eviction is only requested. ``ending_s``: since when its pod has been ending, or gone; None: not seen so far.
    ``dry``: no request is made, as evictions are off or a dry run.
    """

    response: Response
    what: Dimension
    amount: float
    before: float
    at_s: float
    severity: float
    suspect: str | None = None
    title: str = ""
    judged: bool = False
    key: str = ""
    ending_s: float | None = None
    dry: bool = False

    @property
    def describe(self) -> str:
        """The step as text: ``squeeze ns/job: 1.80 -> 0.90 CPU``."""
        match self.what:
            case Dimension.BUDGET:
                return f"hold: BE budget at most {fmt.cpu(self.amount)}"
            case Dimension.NODE:
                return "close: no new BE pods on this node"
            case Dimension.CACHE:
                return f"partition: BE keeps {fmt.percent(self.amount)} of its cache share"
            case Dimension.RUN if self.response is Response.FREEZE:
                return f"freeze {self.title} for at most {fmt.duration(self.amount)}"
            case Dimension.RUN:
                return f"evict {self.title}"
            case Dimension.CPU:
                return f"squeeze {self.title}: {fmt.cpus(self.before)} -> {fmt.cpu(self.amount)}"
            case Dimension.MEMORY:
                return f"squeeze {self.title}: memory {fmt.size(self.before)} -> {fmt.size(self.amount)}"
            case Dimension.DISK:
                return f"squeeze {self.title}: disk {fmt.rate(self.before)} -> {fmt.rate(self.amount)}"


class ActionContext(Struct, frozen=True, kw_only=True):
    """Input of the choice. ``useless``: keys (see `key_of`) of steps that did not help this victim lately.

    ``busy``: suspects with a pending step. ``resting``: pods that are frozen, or were a while ago. ``kept``: pods whose
    eviction was requested a while ago, and not carried out.
    """

    finding: RuleVerdict
    frame: SampleFrame
    history: History
    config: LadderConfig
    responses: Sequence[Response]
    taken: Sequence[ResponseStep]
    useless: Collection[str]
    busy: Collection[str]
    resting: Collection[str]
    kept: Collection[str]
    fresh_s: float

    def sample(self, subject: str, signal: str) -> float | None:
        """The newest value; None: unknown."""
        return self.history.fresh(subject, signal, self.frame.at_s, self.fresh_s)


def key_of(
    finding: RuleVerdict, response: Response, what: Dimension, suspect: PodSnapshot | None, frame: SampleFrame
) -> str:
    """What is remembered as useless: by workload and not by pod, so that a restart of either does not forget it."""
    victim = frame.pods.get(finding.victim.removeprefix("pod:"))
    whose = signature(victim) if victim is not None else finding.victim
    return f"{whose} | {response} {what} | {signature(suspect) if suspect is not None else ''}"


def next_step(chance: ActionContext) -> ResponseStep | None:
    """The mildest change that has not been made, has not failed, and is possible on this node."""
    for response in chance.responses:
        step = _NEXT[response](chance)
        if step is not None:
            return step
    return None


def _hold(chance: ActionContext) -> ResponseStep | None:
    if any(step.response is Response.HOLD for step in chance.taken):
        return None
    if _only_left(chance):
        return None
    budget, use = chance.sample(NODE, "be.budget"), chance.sample(NODE, "be.use")
    if budget is None:
        return None
    # BE must not begin to use its unused part while interference lasts.
    amount = budget if use is None else min(budget, max(use, 0.0))
    return _step(chance, Response.HOLD, Dimension.BUDGET, (amount, budget))


def _squeeze(chance: ActionContext) -> ResponseStep | None:
    for suspect, pod in _suspects(chance):
        for what in _ways(chance):
            step = _tighter(chance, suspect, pod, what)
            if step is not None:
                return step
    return None


def _ways(chance: ActionContext) -> Iterator[Dimension]:
    """What to limit for the shortage. CPU last for the others: a pod that runs less also allocates and reads less."""
    if _only_left(chance):
        return
    if chance.finding.resource is ContendedResource.MEMORY and "memory.high" in chance.frame.knobs:
        yield Dimension.MEMORY
    if chance.finding.resource is ContendedResource.IO and _DISK_KNOBS & set(chance.frame.knobs) and chance.frame.disks:
        yield Dimension.DISK
    yield Dimension.CPU


def _only_left(chance: ActionContext) -> bool:
    """Whether a CPU is what lacks, and BE work runs only where no online pod wants one.

    Its bound would be a quota, and that makes online pods wait (docs/cpu.md, "A quota beside the least weight").
    """
    return chance.frame.be_yields and chance.finding.resource is ContendedResource.CPU


def _tighter(chance: ActionContext, suspect: Suspect, pod: PodSnapshot, what: Dimension) -> ResponseStep | None:
    if key_of(chance.finding, Response.SQUEEZE, what, pod, chance.frame) in chance.useless:
        return None
    own = chance.finding.resource is _LACKING.get(what)
    if what is Dimension.DISK:
        rates = [chance.sample(pod.subject, name) for name in ("disk.read", "disk.write")]
        use = max((rate for rate in rates if rate is not None), default=None)
    else:
        use = chance.sample(pod.subject, "memory.use" if what is Dimension.MEMORY else "cpu.use")
    if use is None:
        return None
    gap = chance.finding.gap if own else None
    take = gap if gap is not None else use * _UNKNOWN_STEP
    amount = max(_floor(what), use - max(take, use * _LEAST_STEP))
    last = [step.amount for step in chance.taken if step.suspect == pod.uid and step.what is what]
    bound = min([use, *last])
    if amount > _felt(bound):
        return None  # at the bottom already: no change that could be felt
    return _step(chance, Response.SQUEEZE, what, (amount, use), suspect)


def intensified(step: ResponseStep) -> ResponseStep | None:
    """The same squeeze, as large as for an unknown shortage. None: it is that large, or no squeeze.

    A victim's shortage is measured while the suspect causes it and the rest of the node uses every gap: a small step
    without an effect proves little about the suspect, a large one does.
    """
    if step.response is not Response.SQUEEZE:
        return None
    amount = max(_floor(step.what), step.before * (1 - _UNKNOWN_STEP))
    return replace(step, amount=amount) if amount <= _felt(step.amount) else None


def _floor(what: Dimension) -> float:
    """What a suspect keeps in any case."""
    match what:
        case Dimension.MEMORY:
            return _LEAST_MEMORY_BYTES
        case Dimension.DISK:
            return _LEAST_DISK_BPS
        case _:
            return _LEAST_CPU_MILLI


def _felt(bound: float) -> float:
    """The largest amount below a bound that could be felt."""
    return bound * (1 - _LEAST_STEP / 2)


def _partition(chance: ActionContext) -> ResponseStep | None:
    if chance.finding.resource is not ContendedResource.CACHE:
        return None
    if key_of(chance.finding, Response.PARTITION, Dimension.CACHE, None, chance.frame) in chance.useless:
        return None
    now = min([step.amount for step in chance.taken if step.what is Dimension.CACHE], default=100.0)
    lower = [percent for percent in _PARTITIONS if percent < now]
    return _step(chance, Response.PARTITION, Dimension.CACHE, (lower[0], now)) if lower else None


def _close(chance: ActionContext) -> ResponseStep | None:
    """No new BE pods: it ends no interference that there is, and keeps it from growing, also after an eviction."""
    if any(step.response is Response.CLOSE for step in chance.taken):
        return None
    return _step(chance, Response.CLOSE, Dimension.NODE, (0.0, 0.0))


def _freeze(chance: ActionContext) -> ResponseStep | None:
    if "freeze" not in chance.frame.knobs:
        return None
    for suspect, pod in _suspects(chance):
        stopped = any(step.suspect == pod.uid and step.what is Dimension.RUN and not step.dry for step in chance.taken)
        if stopped or pod.uid in chance.resting:
            continue
        if not _grave(chance, pod):
            continue
        if key_of(chance.finding, Response.FREEZE, Dimension.RUN, pod, chance.frame) not in chance.useless:
            return _step(chance, Response.FREEZE, Dimension.RUN, (chance.config.freeze.max_s, 0.0), suspect)
    return None


def _evict(chance: ActionContext) -> ResponseStep | None:
    for suspect, pod in _suspects(chance):
        requested = any(
            step.suspect == pod.uid and step.response is Response.EVICT and not step.dry for step in chance.taken
        )
        if (
            not requested
            and pod.uid not in chance.kept
            and _grave(chance, pod)
            and key_of(chance.finding, Response.EVICT, Dimension.RUN, pod, chance.frame) not in chance.useless
        ):
            return _step(chance, Response.EVICT, Dimension.RUN, (0.0, 0.0), suspect)
    return None


def _grave(chance: ActionContext, pod: PodSnapshot) -> bool:
    """Whether freezing the suspect could give the victim most of its shortage: for less no pod is frozen."""
    if chance.finding.resource is not ContendedResource.CPU or chance.finding.gap is None:
        return True
    use = chance.sample(pod.subject, "cpu.use")
    return use is not None and use >= chance.finding.gap * _MOST_OF_IT


_NEXT: Final = {
    Response.HOLD: _hold,
    Response.SQUEEZE: _squeeze,
    Response.PARTITION: _partition,
    Response.CLOSE: _close,
    Response.FREEZE: _freeze,
    Response.EVICT: _evict,
}


def _suspects(chance: ActionContext) -> Iterator[tuple[Suspect, PodSnapshot]]:
    """Suspects that may be limited, the most probable first: pods that are certainly BE and have no pending step."""
    for suspect in chance.finding.suspects:
        pod = chance.frame.pods.get(suspect.uid)
        if pod is None or pod.pod_class is not PodClass.RECLAIMED or not pod.certain or pod.terminating or pod.held:
            continue
        if suspect.score >= chance.config.min_score and suspect.uid not in chance.busy:
            yield suspect, pod


def _step(
    chance: ActionContext,
    response: Response,
    what: Dimension,
    bound: tuple[float, float],
    suspect: Suspect | None = None,
) -> ResponseStep:
    """``bound``: what is left, and what there was."""
    pod = None if suspect is None else chance.frame.pods[suspect.uid]
    return ResponseStep(
        response=response,
        what=what,
        amount=bound[0],
        before=bound[1],
        at_s=chance.frame.at_s,
        severity=chance.finding.severity,
        suspect=None if suspect is None else suspect.uid,
        title="" if suspect is None else suspect.title,
        judged=response in _NOT_EVALUATED,
        key=key_of(chance.finding, response, what, pod, chance.frame),
    )


def pending(steps: Iterable[ResponseStep]) -> ResponseStep | None:
    """The step whose effect is not evaluated yet."""
    return next((step for step in steps if not step.judged), None)
