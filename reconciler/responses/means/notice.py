"""The notice to a pod before any action on it, and the bounded wait for its acknowledgement.

The notice is optional: a notice that fails is reported and delays nothing. After a crash of the daemon the file is
written again (it is the same file), a signal or a command is not sent twice, and the wait continues with the time left.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, final

import msgspec
import trio
from msgspec import Struct

from cgroupfs.lines import status_mask
from cgroupfs.subtree import Subtree
from reconciler.responses.means.base import EvictionWork
from reconciler.responses.means.config import NoticeConfig, NoticeKind, signal_number
from reconciler.responses.means.processes import PodTermination, read_stat, wait_empty
from reconciler.runtime.cooperative import TimeSlice
from reconciler.runtime.format import duration
from reconciler.runtime.notefile import EMPTY_DIRS, NoteFile, is_name
from reconciler.runtime.stints import in_worker
from state.eviction import EvictionCase

if TYPE_CHECKING:
    from reconciler.clients.command import Command

_LOOK_S: Final = 0.5
_FILE_S: Final = 2.0


class NoticeRequest(Struct, frozen=True, kw_only=True):
    """How one pod is notified: ``name`` is the volume's or the signal's."""

    kind: NoticeKind
    name: str = ""


def parse_request(config: NoticeConfig, annotation: str | None) -> tuple[NoticeRequest, str]:
    """The request by the configuration and the pod's own annotation, and a message about an invalid one. Pure.

    A pod cannot choose a command: that would be run as root on the node.
    """
    default = {NoticeKind.VOLUME: config.volume, NoticeKind.SIGNAL: config.signal}.get(config.kind, "")
    request = NoticeRequest(kind=config.kind, name=default)
    if annotation is None:
        return request, ""
    kind, _, name = annotation.partition(":")
    if kind == NoticeKind.NONE and not name:
        return NoticeRequest(kind=NoticeKind.NONE), ""
    if kind == NoticeKind.VOLUME and is_name(name):
        return NoticeRequest(kind=NoticeKind.VOLUME, name=name), ""
    if kind == NoticeKind.SIGNAL and _is_signal(name):
        return NoticeRequest(kind=NoticeKind.SIGNAL, name=name), ""
    return (
        request,
        f"annotation bypassd/eviction-notice: {annotation[:60]!r}: expected none, volume:NAME or signal:NAME",
    )


class NoticeMessage(Struct, frozen=True, kw_only=True, rename="camel"):
    """The notice to the pod, or the input of the command: JSON."""

    order: str
    uid: str
    namespace: str | None
    pod: str | None
    cause: str
    ends_at: int
    """Seconds since the epoch: nothing is done before."""
    grace_s: float


@final
class NoticeSender:
    """Gives notices and waits for what they bring. ``pods_dir`` is the kubelet's, root prefix included."""

    def __init__(self, config: NoticeConfig, pods_dir: str) -> None:
        self.config = config
        self._pods_dir = pods_dir
        self._lane = trio.CapacityLimiter(4)
        self._program: Command | None = None
        if config.kind is NoticeKind.COMMAND:
            from reconciler.clients import command  # few nodes have one

            self._program = command.Command(config.command)

    def wanted(self, case: EvictionCase) -> NoticeRequest | None:
        """How this pod is notified; None: not at all."""
        wish, _ = parse_request(self.config, case.target.notice)
        return None if wish.kind is NoticeKind.NONE else wish

    async def send(self, work: EvictionWork, wish: NoticeRequest, *, again: bool) -> str:
        """Send the notice and wait for the time left; returns the result as text. Errors: none.

        ``again``: an earlier run of the daemon may have sent it.
        """
        _, problem = parse_request(self.config, work.case.target.notice)
        left_s = max(0.0, self.config.wait_s - work.elapsed_s())
        with trio.move_on_after(left_s):
            try:
                note = self._note(work.case, wish)
                if note is not None:
                    await self._in_thread(lambda: note.write(_text(work, self.config.wait_s)))
                    said = await self._wait_for(work, note)
                elif wish.kind is NoticeKind.SIGNAL:
                    count = 0 if again else await signal_main(work.tree, work.processes, signal_number(wish.name))
                    said = "" if count or again else f"none of its main processes handles {wish.name}"
                    if not said and await wait_empty(work.tree, left_s):
                        said = "ended by itself"
                else:
                    said = "" if again else await self._run(work, left_s)
                    if not said and await wait_empty(work.tree, left_s):
                        said = "ended by itself"
            except OSError as exc:
                said = f"notice failed: {exc.strerror or exc}"
            except trio.TooSlowError:
                said = "notice failed: the file system does not answer"
            return "; ".join(filter(None, (problem, said)))
        return "; ".join(filter(None, (problem, f"no answer within {duration(self.config.wait_s)}")))

    async def withdraw(self, case: EvictionCase) -> None:
        """The pod remains after all: take the file away."""
        wish = self.wanted(case)
        if wish is None:
            return
        try:
            note = self._note(case, wish)
            if note is not None:
                await self._in_thread(note.remove)
        except (OSError, trio.TooSlowError):
            return  # the volume was removed or replaced, or the file cannot be removed: nothing is reported

    def _note(self, case: EvictionCase, wish: NoticeRequest) -> NoteFile | None:
        if wish.kind is not NoticeKind.VOLUME:
            return None
        return NoteFile(self._pods_dir, (case.order.uid, "volumes", EMPTY_DIRS, wish.name), self.config.file)

    async def _wait_for(self, work: EvictionWork, note: NoteFile) -> str:
        while not await self._in_thread(note.acknowledged):
            if await wait_empty(work.tree, _LOOK_S):
                return "ended by itself"
        return "acknowledged"

    async def _run(self, work: EvictionWork, left_s: float) -> str:
        """The hook; empty when it did not end with 0, so that the time is waited for. Errors: `OSError`."""
        assert self._program is not None
        done = await self._program.run(left_s, _text(work, self.config.wait_s).encode())
        return "" if done.problem else "acknowledged"

    async def _in_thread(self, act: Callable[[], bool | None]) -> bool:
        """A file system that hangs costs the notice, not the eviction."""
        with trio.fail_after(_FILE_S):
            return bool(await in_worker(act, abandon_on_cancel=True, limiter=self._lane))


async def signal_main(tree: Subtree, processes: PodTermination, number: int) -> int:
    """Send a signal to each container's main process that handles it: another one would end by it, unasked."""
    members = await processes.members(tree)
    slices, mains = TimeSlice(), dict[int, int]()
    for pid in members:
        await slices.checkpoint()
        stat = read_stat(pid, processes.proc)
        # The runtime started it, so its parent is outside; its own children have a parent inside.
        if stat is not None and stat.parent not in members and _handles(processes.proc, pid, number):
            mains[pid] = stat.start
    return await processes.signal(tree, number, mains) if mains else 0


def _handles(proc: str, pid: int, number: int) -> bool:
    try:
        with open(f"{proc}/{pid}/status", encoding="utf-8", errors="replace", newline="\n") as file:
            caught = status_mask(file.read(), "SigCgt:")
    except OSError:
        return False
    return bool(caught >> (number - 1) & 1)


def _text(work: EvictionWork, wait_s: float) -> str:
    order = work.case.order
    word = NoticeMessage(
        order=order.id,
        uid=order.uid,
        namespace=order.namespace,
        pod=order.name,
        cause=order.cause[:500],
        ends_at=round(work.case.step_s + wait_s),
        grace_s=work.grace_s,
    )
    return msgspec.json.encode(word).decode() + "\n"


def _is_signal(name: str) -> bool:
    try:
        signal_number(name)
    except ValueError:
        return False
    return True
