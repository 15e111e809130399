"""Values that somebody else has written: whose they are, whether ours may be set again, and what is noted and told.

`ForeignWrites` decides; here is what it is asked, and what its answers lead to.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Final, Protocol, final

from reconciler.actuators.standing import Alert, Standings
from reconciler.actuators.work import Work
from reconciler.foreign import Answer, ForeignWrites
from reconciler.holds import file_target
from state.entry import US, Entry
from state.ledger import Ledger
from state.model import Hold

_LOG: Final = logging.getLogger(__name__)
_PERSON: Final = "person"
_RUNTIME: Final = "runtime"
_KUBELET: Final = "kubelet"
_UNKNOWN: Final = "unknown"
_EXPECTED: Final = frozenset({_RUNTIME, _KUBELET})
_UPDATERS: Final = frozenset({_RUNTIME, _UNKNOWN})
"""Who may be a runtime in the middle of its update. Unknown: it has ended already, or no kernel names writers here."""
_UPDATE_S: Final = 0.25
"""Longest recorded ``runc update``: 11 ms; on a busy machine many times that."""
_STATES: Final = {Answer.WAIT: "waiting", Answer.HOLD: "held", Answer.YIELD: "yielded"}


class Attribution(Protocol):
    """Who wrote a file last, as far as anybody saw."""

    def last_writer(self, directory: str, file: str) -> tuple[str, str] | None:
        """(kind, process), None when nobody was seen."""


@final
class Others:
    """See the module's text."""

    def __init__(
        self,
        *,
        ledger: Ledger,
        rules: ForeignWrites,
        attribution: Attribution | None,
        standings: Standings,
        alert: Alert,
        held: Callable[[Hold], None],
    ) -> None:
        """``held`` is told of the holds that a person's own writes make."""
        self.writes: Counter[str] = Counter()
        """Foreign writes by the writer's kind."""
        self.yields = 0
        self._updating: dict[tuple[str, str], float] = {}
        """Since when the runtime is seen writing a file without having signalled."""
        self._ledger = ledger
        self._rules = rules
        self._attribution = attribution
        self._standings = standings
        self._alert = alert
        self._held = held

    def may_reassert(self, work: Work, entry: Entry) -> bool:
        """Decide about a foreign value; note it, count it, tell it."""
        now = time.monotonic()
        kind, process = self._who(work)
        if kind in _UPDATERS and self._mid_update(work, now):
            return False
        fresh = self.note(work, entry)
        verdict = self._rules.decide(
            work.place,
            process or kind,
            now,
            person=kind == _PERSON,
            expected=work.target.signalled or kind in _EXPECTED,
            fresh=fresh,
        )
        if fresh:
            _LOG.info(
                "%s %s: %s",
                *(work.key[1], work.knob.name, verdict.words),
                # Below one key: a record has a "process" of its own, and refuses to have it overwritten.
                extra={"fields": {"writer": kind, "process": process}},
            )
        if verdict.answer is Answer.REASSERT:
            return True
        if verdict.answer is Answer.HOLD:
            until = time.time() + (verdict.again_at or now) - now
            self._held(Hold(target=file_target(*work.place), reason="set by hand", by=process, until=until))
        state = _STATES[verdict.answer]
        known = self._standings.of(work.place)
        news = known is None or known.state != state
        self._standings.note(work, state, verdict.words if known is None or news else known.detail)
        if verdict.answer is not Answer.WAIT and news:
            yielded = verdict.answer is Answer.YIELD
            self.yields += yielded
            self._ledger.set_yielded(work.key, yielded=yielded, reason=verdict.words)
            self._alert("yield" if yielded else "hold", verdict.words, work.setting)
        return False

    def note(self, work: Work, entry: Entry) -> bool:
        """Enter a value that is not ours; False when it has been entered before."""
        if not (entry.writer == US or entry.seen is None or work.knob.normal(entry.seen, work.version) != work.actual):
            return False
        kind, process = self._who(work)
        self._ledger.saw(work.key, work.raw, writer=kind, process=process)
        self.writes[kind] += 1
        if kind == _KUBELET and work.target.container is None and work.target.pod_uid is not None:
            # It writes a pod's directory when the pod is made or resized: that is what to restore to from now on.
            self._ledger.rebase(work.key, work.raw)
        return True

    def settled(self, place: tuple[str, str]) -> None:
        """The file holds what is wanted again: whoever was at it has finished, and the next write begins anew."""
        self._updating.pop(place, None)

    def waits(self, place: tuple[str, str], now: float) -> bool:
        """Whether a file is left to others for now (monotonic seconds)."""
        return place in self._updating or self._rules.state(place, now) is not None

    def next_end(self, now: float) -> float | None:
        """When the next such wait ends (monotonic seconds), None when nothing waits."""
        return self._rules.pending(now)

    def forget(self, path: str) -> None:
        """The group is gone."""
        self._rules.forget(path)
        for place in [place for place in self._updating if place[0] == path]:
            del self._updating[place]

    def _mid_update(self, work: Work, now: float) -> bool:
        """True while the runtime may still be at it: it has written, and its signal has not come yet.

        runc reads the shares back after writing them and fails the kubelet's update when they are not what it wrote.
        Its rename ends the wait (the hot lane answers it); a runtime that gives no signal is waited for a moment.
        """
        if work.target.signalled or work.target.container is None:
            self._updating.pop(work.place, None)
            return False
        since = self._updating.setdefault(work.place, now)
        # The very sum that `look_again` is given: rounded otherwise, it would be due before it is over, for ever.
        if now >= since + _UPDATE_S:
            del self._updating[work.place]
            return False
        self._standings.look_again(work, since + _UPDATE_S)
        self._standings.note(work, "waiting", "the runtime is writing")
        return True

    def _who(self, work: Work) -> tuple[str, str]:
        seen = self._attribution.last_writer(work.directory, work.key[2]) if self._attribution is not None else None
        if seen is not None:
            return seen
        return (_RUNTIME, "the runtime's update") if work.target.signalled else (_UNKNOWN, "")
