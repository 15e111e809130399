"""What to do when somebody else changed a file that we manage: re-assert, wait, yield, or honour it as a hold.

A pure state machine per file. Everybody else on the node writes these files too (kubelet, runtime, systemd, a person);
an agent that always writes back fights for ever, one that never does protects nobody. So: the first foreign write is
corrected at once, the next ones after 1, 2, 4 … seconds, and after ``rounds`` of them within ``window_s`` we *yield*:
the file keeps the other's value, an alert tells so, and it is tried again after ``retry_yielded_s`` or when what we
want changes. What a person wrote by hand is a decision, not a disturbance: it becomes a hold at once.

A write that ended in the runtime's signal (the kubelet's CPU manager through ``runc update``) is expected a few times
in a container's life (static policy from 1.22: once in its first ten seconds and at each change of the default set);
it is corrected without delay, and counted, so that the unconditional ten-second rewrite of kubelets up to 1.21 ends in
a yield instead of a tug-of-war.
"""

from enum import StrEnum
from typing import Annotated, NamedTuple, final

from msgspec import Meta, Struct


class Answer(StrEnum):
    """What the worker does about a foreign value."""

    REASSERT = "reassert"
    WAIT = "wait"
    YIELD = "yield"
    HOLD = "hold"


class ForeignRules(Struct, frozen=True, kw_only=True):
    """Bounds of the tug-of-war. Times in seconds."""

    rounds: Annotated[
        int, Meta(ge=1, le=1000, description="foreign writes of one file within the window before it is left to them")
    ] = 5
    window_s: Annotated[float, Meta(ge=1, le=86400, description="how long a foreign write counts")] = 120.0
    backoff_s: Annotated[
        float, Meta(ge=0.01, le=3600, description="wait before the second answer; doubles with each further one")
    ] = 1.0
    backoff_max_s: Annotated[float, Meta(ge=0.01, le=3600, description="the longest such wait")] = 30.0
    retry_yielded_s: Annotated[
        float, Meta(ge=1, le=604800, description="when a file that was left to others is tried again")
    ] = 3600.0
    hold_person_s: Annotated[
        float,
        Meta(
            ge=0,
            le=604800,
            description="how long a value that a person wrote by hand stays, and a pod after restore --pod",
        ),
    ] = 3600.0


class Verdict(NamedTuple):
    """The answer, when to look again (monotonic seconds, None: no need), and the words for the event."""

    answer: Answer
    again_at: float | None
    words: str


@final
class FileHistory:
    """The foreign writes of one file. Small on purpose: one exists only for a file that somebody else has written."""

    __slots__ = ("last", "rounds", "until")

    def __init__(self) -> None:
        self.rounds: list[float] = []
        self.until = 0.0
        self.last = Answer.REASSERT


@final
class ForeignWrites:
    """Decides, per file, about values that are not the one we wrote."""

    def __init__(self, rules: ForeignRules) -> None:
        """``rules`` may be replaced at any time; waits that have begun keep their end."""
        self.rules = rules
        self._files: dict[tuple[str, str], FileHistory] = {}

    def decide(
        self, key: tuple[str, str], writer: str, now: float, *, person: bool, expected: bool, fresh: bool = True
    ) -> Verdict:
        """One foreign value has been found at ``key`` (group path, knob), written by ``writer`` as far as is known.

        ``expected`` marks a write that came with the runtime's signal. Not ``fresh``: this value has been asked about
        before and still stands, so it is no further write; our own was refused, or the hold on it is over. While a
        wait or yield lasts the answer is repeated and nothing is counted; the first question after its end is
        answered with REASSERT.
        """
        rules = self.rules
        history = self._files.setdefault(key, FileHistory())
        if history.until:
            if now < history.until:
                return Verdict(history.last, history.until, f"written by {writer}")
            history.until = 0.0
            if history.last is not Answer.WAIT:
                history.rounds.clear()
            history.last = Answer.REASSERT
            return Verdict(Answer.REASSERT, None, "the wait is over; set again")
        if not fresh:
            return Verdict(Answer.REASSERT, None, f"{writer} wrote it; set again")
        if person:
            # It lasts as a `Hold`, which people can see and release, and which outlives the process.
            history.rounds.clear()
            words = f"{writer} set it by hand; honoured as a hold"
            return Verdict(Answer.HOLD, now + rules.hold_person_s, words)
        history.rounds = [at for at in history.rounds if now - at < rules.window_s]
        history.rounds.append(now)
        count = len(history.rounds)
        if count > rules.rounds:
            words = f"{writer} wrote it {count} times within {now - history.rounds[0]:.0f} s; left to them"
            return self._until(history, Answer.YIELD, now + rules.retry_yielded_s, words)
        if expected or count == 1:
            return Verdict(Answer.REASSERT, None, f"{writer} wrote it; set again")
        delay = min(rules.backoff_s * 2 ** (count - 2), rules.backoff_max_s)
        return self._until(history, Answer.WAIT, now + delay, f"{writer} wrote it again; waiting {delay:g} s")

    def _until(self, history: FileHistory, answer: Answer, until: float, words: str) -> Verdict:
        history.last, history.until = answer, until
        return Verdict(answer, until, words)

    def state(self, key: tuple[str, str], now: float) -> Answer | None:
        """The answer in force for ``key`` (WAIT or YIELD), None when its value is ours to set."""
        history = self._files.get(key)
        return history.last if history is not None and now < history.until else None

    def forget(self, path: str) -> None:
        """The group is gone, what we want for it has changed, or a person released the hold: start anew."""
        for key in [key for key in self._files if key[0] == path]:
            del self._files[key]

    def pending(self, now: float) -> float | None:
        """When the next wait ends (monotonic seconds), None when nothing waits."""
        times = [history.until for history in self._files.values() if history.until > now]
        return min(times, default=None)
