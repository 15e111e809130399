"""Every problem of one pod as text: the messages of its classification, and what of its settings is not in force.

The node's list (`reconciler.daemon.status`), its metrics and alerts have the same facts from the same sources; this
is by pod, for its part of the document, `bypassctl why` and the pod lists.
"""

from collections.abc import Iterator
from typing import Final, final

from reconciler.control.bounds_in_force import bound_problems, sandboxed_text
from reconciler.daemon.agent import Agent
from reconciler.sources.outside import outside_of_pods, outside_text
from state.model import Pod

_DEDICATED: Final = "dedicated/"
_LINES: Final = 20
"""Messages of one pod that are shown."""


@final
class PodProblems:
    """The problems of one moment, by pod."""

    def __init__(self, agent: Agent) -> None:
        self._limits = agent.control.owner_check.limits
        self._controllers = agent.control.reconciler.controllers
        self._earlier = agent.control.reconciler.earlier_run
        self._refusals = agent.control.reconciler.refusals
        self._outside = outside_of_pods(agent.sources.outside)
        self._broken: dict[str, list[str]] = {}
        """Bounds and exclusive CPUs that are not in force, and files that cannot be read, by uid."""
        for problem in bound_problems(agent.control.reconciler):
            for uid in problem.uids:
                self._broken.setdefault(uid, []).append(problem.text)
        for status in agent.writes.judge.statuses.unreadable_settings():
            uid, text = status.setting.pod_uid or "", f"{status.setting.path}: {status.setting.knob}: {status.detail}"
            self._broken.setdefault(uid, []).append(text)
        for claim in agent.control.claims():
            if claim.cut and claim.owner.startswith(_DEDICATED):
                for uid in claim.pods:
                    self._broken.setdefault(uid, []).append(claim.message)

    def of(self, pod: Pod) -> list[str]:
        """One line each, none twice."""
        return list(dict.fromkeys(self._texts(pod)))[:_LINES]

    def breaks(self, pod: Pod) -> bool:
        """Whether a bound of the pod, or its claim on exclusive CPUs, is not in force."""
        return pod.uid in self._broken

    def _texts(self, pod: Pod) -> Iterator[str]:
        yield from pod.classification.problems
        yield from self._broken.get(pod.uid, ())
        yield from self._limits.problems(pod.uid)
        yield from self._controllers.problems(pod.group.path)
        yield from self._earlier.problems(pod.uid)
        if text := sandboxed_text(pod, self._refusals.get(pod.uid, ())):
            yield text
        if (path := self._outside.get(pod.uid)) is not None:
            yield outside_text(path)
