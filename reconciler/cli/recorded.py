"""What a capture has beside the node's own files: responses of kubelet and runtime, and two readings of CPU use.

They are below ``bypassd-capture/`` in the captured tree. Written by ``capture``, read by ``plan``; a tree without them
(a plain copy of a node) is a node whose kubelet and runtime do not respond.
"""

import errno
import os
from collections.abc import Mapping
from typing import Final, TypeVar

import msgspec
from msgspec import Struct

from cgroupfs.bounded import decoded, read_file
from cgroupfs.errors import InputError
from reconciler.cli import places
from reconciler.pods.marks import MarkReader
from reconciler.sources.cri import RuntimeCondition, RuntimeVersion
from reconciler.sources.kubelet_api import decode_pods
from state.model import PodMeta

DIRECTORY: Final = "bypassd-capture"
ABOUT: Final = places.ABOUT
KUBELET_PODS: Final = f"{DIRECTORY}/kubelet-pods.json"
CRI: Final = f"{DIRECTORY}/cri.json"
USAGE: Final = f"{DIRECTORY}/usage.json"
STATE: Final = f"{DIRECTORY}/state.json"
_LARGEST: Final = 128 << 20
"""Bytes: twice what the kubelet may answer."""

T = TypeVar("T")


class CaptureInfo(Struct, frozen=True, kw_only=True):
    """The capture itself. ``at`` is wall-clock seconds; ``problems`` is what could not be had.

    ``config``: the path of the agent's configuration on the node; its files are in the capture. ``zone``: the name of
    the node's time zone.
    """

    version: str
    node: str
    at: float
    files: int
    kubelet_version: str | None = None
    kubelet: str = ""
    cri: str = ""
    problems: tuple[str, ...] = ()
    config: str | None = None
    zone: str = "UTC"


class CriAnswers(Struct, frozen=True, kw_only=True):
    """What the runtime answered over CRI, as the agent keeps it."""

    version: RuntimeVersion | None = None
    conditions: tuple[RuntimeCondition, ...] = ()
    pods: tuple[PodMeta, ...] = ()


class UsageReading(Struct, frozen=True, kw_only=True):
    """One reading of CPU use: /proc/stat, and each pod's CPU nanoseconds by uid. ``at``: monotonic seconds."""

    at: float
    stat: str
    pods: Mapping[str, int]


class RecordedNode(Struct, frozen=True, kw_only=True):
    """All of it; a part that was not recorded is None."""

    about: CaptureInfo | None = None
    kubelet: tuple[PodMeta, ...] | None = None
    cri: CriAnswers | None = None
    usage: tuple[UsageReading, ...] = ()
    problems: tuple[str, ...] = ()

    def metas(self, uid: str) -> list[PodMeta]:
        """The reported metadata of one pod."""
        pods = (*(self.kubelet or ()), *(self.cri.pods if self.cri is not None else ()))
        return [meta for meta in pods if meta.uid == uid]


def read_recorded(root: str, marks: MarkReader) -> RecordedNode:
    """What lies in a captured tree. ``marks`` takes what is kept of labels and annotations.

    Errors: `InputError` for a file that is not what it should be.
    """
    answer = _bytes(root, KUBELET_PODS)
    pods: tuple[PodMeta, ...] | None = None
    problems: tuple[str, ...] = ()
    if answer is not None:
        try:
            pods, problems = decode_pods(answer, marks)
        except ValueError as exc:
            raise InputError(os.path.join(root, KUBELET_PODS), str(exc), "the kubelet's answer to /pods") from exc
    return RecordedNode(
        about=_decoded(root, ABOUT, CaptureInfo),
        kubelet=pods,
        cri=_decoded(root, CRI, CriAnswers),
        usage=_decoded(root, USAGE, tuple[UsageReading, ...]) or (),
        problems=problems,
    )


def captured_at(root: str) -> tuple[float | None, str]:
    """When the tree was captured, in seconds since the epoch, None: it does not say; and the name of the node's zone.

    Errors: `InputError` for a file that is not what it should be.
    """
    about = _decoded(root, ABOUT, CaptureInfo)
    return (None, "UTC") if about is None else (about.at, about.zone)


def _decoded(root: str, path: str, kind: type[T]) -> T | None:
    text = _bytes(root, path)
    if text is None:
        return None
    try:
        return decoded(msgspec.json.Decoder(kind).decode, text)
    except ValueError as exc:
        raise InputError(os.path.join(root, path), str(exc), "a file of bypassctl capture") from exc


def _bytes(root: str, path: str) -> bytes | None:
    try:
        return read_file(os.path.join(root, path), _LARGEST)
    except OSError as exc:
        if exc.errno == errno.EFBIG:
            raise InputError(os.path.join(root, path), exc.strerror, "a file of bypassctl capture") from exc
        return None
