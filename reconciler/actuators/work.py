"""What passes between judging and writing: a group with what is wanted there, and one file to be written."""

from collections.abc import Mapping
from typing import NamedTuple

from msgspec import Struct

from cgroupfs.codecs import Version
from cgroupfs.knobs import Knob
from reconciler.actuators.compare import Move
from state.entry import FileKey
from state.model import Container, GroupRef, Phase, Setting


class Target(Struct, frozen=True, kw_only=True):
    """One group, and all that is wanted there, by knob: settings of ours that are not among them are taken back.

    ``signalled``: the runtime has just written (its signal came), so a foreign value is its doing and expected.
    """

    group: GroupRef
    settings: Mapping[str, Setting] = {}
    pod_uid: str | None = None
    container: Container | None = None
    signalled: bool = False

    @property
    def creating(self) -> bool:
        """True while what is written would be lost: the runtime has not written its own values yet."""
        return self.container is not None and self.container.phase is Phase.CREATING


class KnobFile(NamedTuple):
    """One knob's file in one group. ``key`` is (controller, group path, file name)."""

    knob: Knob
    version: Version
    directory: str
    key: FileKey


class Work(NamedTuple):
    """One file that is about to be written. ``raw`` is its text as read, ``actual`` the same in normal form."""

    target: Target
    knob: Knob
    version: Version
    directory: str
    key: FileKey
    setting: Setting | None
    raw: str
    actual: str
    text: str
    move: Move

    @property
    def place(self) -> tuple[str, str]:
        """Group path and knob."""
        return self.key[1], self.knob.name

    @property
    def is_zero(self) -> bool:
        """Whether it turns its knob off."""
        return self.knob.decode(self.text, self.version) == 0
