"""An operator's hold on a pod, a knob, a file or the whole node: its limits, and which hold covers a file. Pure."""

from collections.abc import Iterable, Mapping
from typing import Final

from msgspec.structs import replace

from cgroupfs.errors import InputError
from cgroupfs.knobs import CATALOG
from reconciler.actuators.file_catalog import FILES
from state.cache import RESCTRL_GROUP
from state.closing import NODE_MARK
from state.cpu import CORE_COOKIE, INTERRUPTS, THREAD_POLICY
from state.kinds import CAPACITY
from state.memory import OOM_SCORE, RECLAIM
from state.model import Hold
from state.network import Direction
from state.printable import printable

LONGEST_S: Final = 30 * 86400.0
"""Longest duration of a hold with an end (s); a longer one must be explicitly without an end, until released."""
MOST: Final = 1000
"""Limit of simultaneous holds: every plan checks each of them, and each is a row of the store."""
_LONGEST_TARGET: Final = 4096
"""The kernel's limit of a path."""
_LONGEST_REASON: Final = 500
_LONGEST_BY: Final = 100
_KNOBS: Final = frozenset(
    {
        *CATALOG,
        CORE_COOKIE,
        RESCTRL_GROUP,
        OOM_SCORE,
        THREAD_POLICY,
        INTERRUPTS,
        NODE_MARK,
        RECLAIM,
        CAPACITY,
        *(each.knob for each in Direction),
        *FILES,
    }
)
OFF: Final = "off:"
"""Prefix of the hold on a freed pod, before its uid; it exists beside a hold that a person made."""
OFF_NODE: Final = "off:node"
"""Under this hold the node accepts new BE pods, whatever is short."""
_EXPECTED = "node, pod:UID, knob:NAME, file:/GROUP/PATH or file:/GROUP/PATH:KNOB"


def check_target(target: str) -> str:
    """The target itself if it is valid. Errors: `InputError` naming the valid forms."""
    if len(target) > _LONGEST_TARGET or not target.isprintable():
        raise InputError("hold target", target, f"at most {_LONGEST_TARGET} printable characters: {_EXPECTED}")
    kind, _, rest = target.partition(":")
    if target == "node" or (kind in {"pod", "off", "file"} and rest):
        return target
    if kind == "knob":
        if rest in _KNOBS:
            return target
        raise InputError("hold target", target, f"knob: followed by one of {', '.join(sorted(_KNOBS))}")
    raise InputError("hold target", target, _EXPECTED)


def check_new_target(target: str) -> None:
    """As `check_target`, for a hold that a person makes. Errors: `InputError` for a freed pod, too."""
    if check_target(target).startswith(OFF):
        raise InputError("hold target", target, _EXPECTED)


def check_seconds(seconds: float | None, *, until_released: bool) -> None:
    """Errors: `InputError` unless it is either a duration within bounds or explicitly without an end."""
    # NaN fails this comparison.
    if until_released == (seconds is not None) or (seconds is not None and not 0 < seconds <= LONGEST_S):
        value = "until_released" if until_released and seconds is None else seconds
        raise InputError("hold seconds", value, f"above 0 and at most {LONGEST_S:.0f}, or until_released: true")


def check_reason(reason: str) -> None:
    """Errors: `InputError` if the reason is empty or too long to display."""
    if not reason.strip() or len(reason) > _LONGEST_REASON:
        raise InputError("hold reason", f"{len(reason)} characters", f"1 to {_LONGEST_REASON}")


def tidied(hold: Hold) -> Hold:
    """The hold with texts of bounded length that are safe to print: a process chooses its own name."""
    return replace(hold, reason=printable(hold.reason, _LONGEST_REASON), by=printable(hold.by, _LONGEST_BY))


def active(holds: Iterable[Hold], now: float) -> dict[str, Hold]:
    """The holds in force at wall-clock time ``now``, by target."""
    return {hold.target: hold for hold in holds if hold.until is None or now < hold.until}


def file_target(path: str, knob: str) -> str:
    return f"file:{path}:{knob}"


def group_of(target: str) -> str | None:
    """The group path of a ``file:`` target; None for the other kinds."""
    kind, _, rest = target.partition(":")
    if kind != "file":
        return None
    path, _, knob = rest.rpartition(":")  # a group's name may have a colon, too
    return path if knob in _KNOBS else rest


def pod_hold(holds: Mapping[str, Hold], uid: str | None = None, paths: Iterable[str] = ()) -> Hold | None:
    """The hold that covers a whole pod, the widest first; without a pod, the node's. Not a hold on a knob or a file.

    ``holds``: those in force. ``paths``: the groups of the pod and its containers; a hold on one of them covers the
    pod.
    """
    if not holds:
        return None
    targets = ("node", f"pod:{uid}", f"{OFF}{uid}", *(f"file:{path}" for path in paths))
    return next((holds[target] for target in targets if target in holds), None)


def holding(holds: Mapping[str, Hold], *, path: str, knob: str, pod_uid: str | None) -> Hold | None:
    """The hold that covers one file of one group, the widest first; None if the file may be written."""
    if not holds:
        return None
    for target in (
        "node",
        f"pod:{pod_uid}",
        f"{OFF}{pod_uid}",
        f"knob:{knob}",
        f"file:{path}",
        file_target(path, knob),
    ):
        hold = holds.get(target)
        if hold is not None:
            return hold
    return None
