"""What was given back to containers a moment ago, and is put right when the runtime turns out to have been at it.

The kubelet takes a container over (an exclusive CPU, a resize): its checkpoint says so, our value is no longer wanted,
and the file gets its original back. The runtime writes the new value at about the same time. Where that came first and
is the very value that stood there as ours, nobody could tell; its signal, some milliseconds later, brings a spec that
says what should stand there, and nobody would ever write it again.
"""

import time
from typing import Final, final

from reconciler.actuators.compare import Move
from reconciler.actuators.readings import Readings
from reconciler.actuators.spec import spec_text
from reconciler.actuators.work import Target, Work

_RACE_S: Final = 2.0
"""From the runtime's write to its signal 11 ms were recorded at the most; on a busy machine many times that."""


@final
class Given:
    """See the module's text."""

    def __init__(self, known: Readings) -> None:
        self._known = known
        self._files: dict[tuple[str, str], tuple[float, str]] = {}
        """(group path, knob) -> when, and what the file read afterwards."""

    def __contains__(self, path: str) -> bool:
        if not self._files:
            return False
        now = time.monotonic()
        return any(place[0] == path and now - at < _RACE_S for place, (at, _) in self._files.items())

    def note(self, work: Work, after: str) -> None:
        """A file has its original again, and reads ``after``."""
        now = time.monotonic()
        self._files = {place: one for place, one in self._files.items() if now - one[0] < _RACE_S}
        if work.target.container is not None:
            self._files[work.place] = now, work.knob.normal(after, work.version)

    def forget(self, path: str) -> None:
        """The group is gone."""
        self._files = {place: one for place, one in self._files.items() if place[0] != path}

    def places(self, target: Target) -> list[tuple[str, str]]:
        """The files of a group that `put_right` is about: those given back before the runtime's signal."""
        if not target.signalled or target.container is None:
            return []
        return [place for place in self._files if place[0] == target.group.path]

    def put_right(self, target: Target, place: tuple[str, str]) -> Work | None:
        """What to write after the runtime's signal: its spec's value, where ours of before it still stands.

        Errors: `CgroupError`; then it is to be looked at again.
        """
        assert target.container is not None
        at, after = self._files[place]
        file = self._known.find(*place)
        if file is None or time.monotonic() - at >= _RACE_S or place[1] in target.settings:
            del self._files[place]
            return None
        text = spec_text(file.knob, file.version, target.container.spec)
        raw = self._known.text(file)
        del self._files[place]
        actual = file.knob.normal(raw, file.version)
        if text is None or actual != after or file.knob.normal(text, file.version) == after:
            return None
        return Work(target, *file, None, raw, actual, text, Move.RELEASE)
