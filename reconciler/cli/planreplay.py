"""The plans of a configuration over a recording, beside those of the recorded configuration or of another one."""

from collections.abc import Mapping
from typing import Any, Final, final

from msgspec.structs import replace

from reconciler.cli.exits import CliError, Exit
from reconciler.config.model import Config
from reconciler.control.replay import PlanComparison, PlanTrack, Reassemble
from reconciler.interference.nodesteps import NodeStep, PlannerSettings
from reconciler.pods.classify import ClassificationInput, classify, merge_rules
from reconciler.pods.selectors import ClassRules
from reconciler.runtime import format as fmt
from state.evidence import SampleFrame
from state.model import NodeView, Pod
from state.plan import NodePlan

_LOOPS: Final = ("idle_buffer", "be_memory", "quota_burst", "quota_turbo")
"""Policies with a control loop beside the planner: its results are in the recorded views."""


@final
class PlanReplay:
    """Give it every step with its frame, in turn. ``against``: None for the recorded configuration."""

    def __init__(self, config: Config, against: Config | None) -> None:
        self._config, self._against = config, against
        self._settings: PlannerSettings | None = None
        self._comparison: PlanComparison | None = None
        self._as_recorded: set[str] = set()

    def take(self, step: NodeStep, frame: SampleFrame, *, gap: bool, counted: bool) -> None:
        """The next step. ``gap``: what was before it belongs to another run. Errors: `CliError`."""
        comparison = self._configured(step.settings)
        if gap:
            comparison.begin(step.plan)
        try:
            comparison.step(step.view, step.plan, counted=counted, enforced=frame.enforce)
        except (LookupError, ValueError, ArithmeticError) as exc:
            raise CliError(
                f"the view recorded at {fmt.clock(frame.wall_s)} cannot be planned: {exc}", Exit.USAGE
            ) from exc

    @property
    def plans(self) -> tuple[NodePlan, NodePlan] | None:
        """The last plans, the one to compare with first; None: the recording has no views."""
        comparison = self._comparison
        if comparison is None or comparison.before.plan is None or comparison.now.plan is None:
            return None
        return comparison.before.plan, comparison.now.plan

    def facts(self) -> dict[str, Any] | None:
        """The section ``plans`` of the report; None: the recording has no views."""
        if self._comparison is None:
            return None
        return {
            "compared_with": "recorded" if self._against is None else "against",
            **self._comparison.facts(),
            "as_recorded": sorted(self._as_recorded),
        }

    def _configured(self, settings: PlannerSettings) -> PlanComparison:
        """The comparison under what the daemon planned by at this step: a reload may have changed it."""
        comparison = self._comparison
        if comparison is not None and settings == self._settings:
            return comparison
        self._settings = settings
        old = settings.policies if self._against is None else self._against.policies
        new = self._config.policies
        self._as_recorded |= {name for name in _LOOPS if getattr(new, name) != getattr(settings.policies, name)}
        before_pods = None if self._against is None else _reassembling(self._against.classes, settings)
        now_pods = _reassembling(self._config.classes, settings)
        alike = old == new and (before_pods is None) == (now_pods is None)
        alike &= self._against is None or self._against.classes == self._config.classes
        if comparison is None:
            before = PlanTrack(policies=old, pods=before_pods)
            now = before if alike else PlanTrack(policies=new, pods=now_pods)
            self._comparison = comparison = PlanComparison(before, now)
            return comparison
        if comparison.same and not alike:
            comparison.now = replace(comparison.before)
        comparison.before.policies, comparison.before.pods = old, before_pods
        comparison.now.policies, comparison.now.pods = new, now_pods
        return comparison


def _reassembling(classes: ClassRules, settings: PlannerSettings) -> Reassemble | None:
    """Classes pods by other rules than the recorded ones, with the operator's file of then; None: they are the same.

    Labels and annotations that the daemon had no use for are not in a recording.
    """
    if classes == settings.classes:
        return None
    rules = merge_rules(classes, settings.operator)
    known: dict[str, tuple[Pod, Pod]] = {}

    def pods(view: NodeView) -> Mapping[str, Pod]:
        for uid in known.keys() - view.pods.keys():
            del known[uid]
        for uid, pod in view.pods.items():
            if uid not in known or known[uid][0] is not pod:
                known[uid] = pod, _classed(pod, view, rules)
        return {uid: known[uid][1] for uid in view.pods}

    return pods


def _classed(pod: Pod, view: NodeView, rules: ClassRules) -> Pod:
    certain = pod.classification.certain
    facts = ClassificationInput(
        uid=pod.uid,
        qos=pod.qos,
        namespace=pod.namespace,
        name=pod.name,
        labels=pod.labels if certain else None,
        annotations=pod.annotations if certain else None,
        priority_class=pod.priority_class,
        priority=pod.priority,
        static=pod.static,
        priority_known=pod.spec_known,
        exclusive=bool(view.kubelet.exclusive.get(pod.uid)),
        last=None if certain else pod.classification.last,
    )
    return replace(pod, classification=classify(facts, rules))
