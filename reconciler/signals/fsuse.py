"""Each pod's use of the node's own file systems: its volumes there, its logs, its containers' top layers.

``du`` counts on the kubelet's file system, and on that of the images where it is a separate one: layers there have the
subject ``pod:UID@fs:imagefs``.

**Cost**: two processes a minute, which read the pods' directories. Source: kernel documentation,
filesystems/overlayfs; the kubelet's directories.
"""

import os
import re
import subprocess
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import dropwhile
from typing import Final, NamedTuple, final

from cgroupfs.bounded import digits
from cgroupfs.lines import lines_of
from reconciler.runtime.cooperative import TimeSlice
from reconciler.runtime.format import duration
from reconciler.signals.background_job import BackgroundJob
from reconciler.signals.readers import BaseReader, SampleContext, SampleSheet, SharedReaders
from state.evidence import pod_at, pod_subject
from state.model import Pod

SIGNALS: Final = ("fs.use", "fs.inodes_use")
_EVERY_S: Final = 60.0
_LONGEST_S: Final = 110.0
"""Both counts together; ``du`` is killed then. The numbers are valid for 240 s (`reconciler.signals.history`)."""
_SIZES_S: Final = 80.0
"""The first one. The second has fewer files to count, and finds them in the kernel's caches."""
_HANGS_S: Final = 3 * _LONGEST_S
"""Longer only where a file system keeps ``du`` from being killed."""
_ROOT: Final = re.compile(r"^\d+ \d+ \d+:\d+ \S+ / .* - overlay \S+ \S*?upperdir=([^,\s]+)", re.MULTILINE)
_DU: Final = ("nice", "-n", "19", "du", "-x", "-s")
_ENVIRONMENT: Final = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C"}
# Kubernetes' names of namespaces and pods: nothing that leads elsewhere.
_NAME: Final = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_MOST_MOUNTS: Final = 1 << 20
"""Characters of a mount table that are read."""
_MOUNT: Final = re.compile(
    r"^\d+ \d+ (\d+:\d+) \S+ (\S+/pods/[^/\s]+/(?:volume-subpaths/[^/\s]+/[^/\s]+/[^/\s]+"
    r"|volumes/(?:kubernetes\.io~csi/[^/\s]+/mount|[^/\s]+/[^/\s]+))) .* - (?!tmpfs )",
    re.MULTILINE,
)
"""Where the kubelet mounts volumes. The directories above these are its own: no tenant decides what is in them."""
_LOGS: Final = "var/log/pods"


_IMAGES: Final = "fs:imagefs"


class DirectoryUsage(NamedTuple):
    """Of one pod, at one place. ``at_s``: when counting began."""

    size: int
    inodes: int
    at_s: float


class DuStopped(TimeoutError):
    """``du`` was killed. ``text``: its output, for the paths before the one that it was at."""

    def __init__(self, text: str) -> None:
        super().__init__(None, "du was stopped")
        self.text = text


def run_du(options: Sequence[str], paths: Sequence[str], longest_s: float) -> str:
    """Output of ``du``; files that vanish meanwhile are no error. Blocks. Errors: `OSError`, `DuStopped`."""
    try:
        # Walking a million files in a thread of the agent would delay the loop.
        done = subprocess.run(  # noqa: S603  (two programs of the system, with paths of the node's own)
            [*_DU, *options, "--", *paths],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=_ENVIRONMENT,
            timeout=longest_s,
            check=False,
        )
    except subprocess.TimeoutExpired as exc:
        # Without a last line that has no end.
        lines, _, _ = (exc.stdout or b"").rpartition(b"\n")
        raise DuStopped(os.fsdecode(lines)) from exc
    # The exit statuses of ``nice`` where it cannot run the program.
    if done.returncode in {126, 127}:
        raise FileNotFoundError(None, "no du program found")
    return os.fsdecode(done.stdout)


def parse_du(text: str) -> dict[str, int]:
    """The number of each path. Lines that are not so are left out."""
    numbers: dict[str, int] = {}
    for line in lines_of(text):
        count, tab, path = line.partition("\t")
        if tab and (number := digits(count)) is not None:
            numbers[path] = number
    return numbers


class _Counted(NamedTuple):
    """Of one round. ``late``: the subject at which ``du`` was stopped. ``left``: those after it."""

    uses: dict[str, DirectoryUsage]
    late: str | None = None
    left: tuple[str, ...] = ()


def upper_directory(mountinfo: str) -> str | None:
    """The top layer of a container, from its first process's mount table; None: no overlay.

    Other snapshotters' layers are unknown, and not counted.
    """
    match = _ROOT.search(mountinfo)
    return None if match is None else match[1]


def _without(path: str, mounts: Mapping[str, bool]) -> Iterator[str]:
    """What is to be counted for a directory: all of it, or its entries without these mounts."""
    if path not in mounts:
        yield path
    elif not mounts[path]:
        try:
            names = os.listdir(path)  # asks no entry's file system
        except OSError:
            names = [""]  # it has gone meanwhile: a path without a count
        for name in names:
            yield from _without(f"{path}/{name}", mounts)


@final
class DirectoryUsageReader(BaseReader):
    """A `Reader`. ``kubelet``, ``images``: directories of theirs, without ``root``, the prefix of all paths."""

    def __init__(
        self, shared: SharedReaders, du: Callable[[Sequence[str], Sequence[str], float], str] = run_du
    ) -> None:
        super().__init__(shared)
        means = shared.means
        images = means.filesystems.get("imagefs")
        self._processes = shared.processes
        self._root = means.root.rstrip("/")
        self._pods = f"{self._root}/{means.kubelet.strip('/')}/pods"
        self._logs = f"{self._root}/{_LOGS}"
        self._images = None if images is None else f"{self._root}/{images.strip('/')}"
        self._du = du
        self._job = BackgroundJob[_Counted]("fsuse")
        self._uses: Mapping[str, DirectoryUsage] = {}
        """By subject."""
        self._order: Mapping[str, int] = {}
        """The place of each subject in the next round."""
        self._late: Collection[str] = ()
        """Those at which ``du`` was stopped: counted last, so that no pod's many files hide the others' use."""
        self._next_at = 0.0
        self._problem: str | None = None

    def problems(self) -> Mapping[str, str]:
        return dict.fromkeys(SIGNALS, self._problem) if self._problem else {}

    async def aclose(self) -> None:
        """A count under way is left to itself; it changes nothing."""

    async def read(self, scene: SampleContext, sheet: SampleSheet, now: float) -> None:
        try:
            counted = self._job.take()
        except OSError as exc:
            place = "" if exc.filename is None else f"{exc.filename}: "
            self._problem = f"cannot count the pods' files: {place}{exc.strerror}"
        else:
            if counted is not None:
                self._take(counted)
            elif (busy_s := self._job.busy_s()) > _HANGS_S:
                self._problem = f"cannot count the pods' files: no answer for {duration(busy_s)}"
        at_s = self._clock()
        if at_s >= self._next_at and self._job.free:
            slices = TimeSlice()
            places: dict[str, Sequence[str]] = {}
            for uid, pod in scene.view.pods.items():
                places[uid] = tuple(self._places(pod, now))
                await slices.checkpoint()
            self._job.start(partial(self._count, places, self._order))
            self._next_at = at_s + _EVERY_S
        for uid in scene.view.pods:
            for subject in (pod_subject(uid), pod_at(uid, _IMAGES)):
                if (use := self._uses.get(subject)) is not None:
                    age_s = max(0.0, at_s - use.at_s)
                    sheet.put(subject, "fs.use", use.size, age_s=age_s)
                    sheet.put(subject, "fs.inodes_use", use.inodes, age_s=age_s)

    def _take(self, counted: _Counted) -> None:
        stopped_at = () if counted.late is None else (counted.late,)
        left = {*counted.left, *stopped_at}
        self._late = left.intersection((*self._late, *stopped_at))
        # The late ones are counted in turn, too.
        order = sorted((*counted.left, *counted.uses), key=lambda subject: subject in self._late)
        self._order = {subject: place for place, subject in enumerate((*order, *stopped_at))}
        self._uses = {subject: use for subject, use in self._uses.items() if subject in left} | counted.uses
        self._problem = None
        if stopped_at:
            pods = "1 pod" if len(left) == 1 else f"{len(left)} pods"
            self._problem = f"du took too long at {counted.late} and was stopped; not counted: the files of {pods}"

    def _places(self, pod: Pod, now: float) -> Iterator[str]:
        """Where its files may be; a process's own mount table is left for the thread to read."""
        yield f"{self._pods}/{pod.uid}"
        if all(_NAME.fullmatch(name or "") for name in (pod.namespace, pod.name)):
            yield f"{self._logs}/{pod.namespace}_{pod.name}_{pod.uid}"
        # In kata they are the machine's own, which see the host's mounts.
        for pid in self._processes.get(pod, now) if pod.workload else ():
            yield f"{self._root}/proc/{pid}/mountinfo"

    def _count(self, places: Mapping[str, Sequence[str]], order: Mapping[str, int]) -> _Counted:
        """In the thread. Errors: `OSError` when nothing can be counted."""
        at_s = self._clock()
        nodefs, imagefs = os.stat(self._pods).st_dev, self._image_device()
        mounts, found = self._mounts(nodefs), dict[str, list[str]]()
        for uid, paths in places.items():
            # One file system by both names is the first.
            subjects = {imagefs: pod_at(uid, _IMAGES), nodefs: pod_subject(uid)}
            # Each once: a layer is in the mount tables of all processes of its container.
            for path, device in sorted(set(self._found(paths))):
                # Volumes mounted from elsewhere and memory volumes fill neither file system.
                if device in subjects:
                    found.setdefault(subjects[device], []).extend(_without(path, mounts))
        wanted = {subject: found[subject] for subject in sorted(found, key=lambda subject: order.get(subject, -1))}
        sizes, late = self._numbers("-B1", wanted, _SIZES_S)
        # A directory removed while it was counted makes the whole pod unknown: it may have been the largest.
        whole = {subject: paths for subject, paths in wanted.items() if sizes.keys() >= set(paths)}
        inodes, earlier = self._numbers("--inodes", whole, at_s + _LONGEST_S - self._clock())
        late = earlier or late
        uses = {
            subject: DirectoryUsage(sum(map(sizes.__getitem__, paths)), sum(map(inodes.__getitem__, paths)), at_s)
            for subject, paths in whole.items()
            if inodes.keys() >= set(paths)
        }
        left = () if late is None else tuple(dropwhile(lambda subject: subject != late, wanted))[1:]
        return _Counted(uses, late, left)

    def _numbers(
        self, option: str, wanted: Mapping[str, Sequence[str]], longest_s: float
    ) -> tuple[dict[str, int], str | None]:
        """One of ``du``'s numbers of each path, and the subject at which it was stopped."""
        if not (places := [(path, subject) for subject, paths in wanted.items() for path in paths]):
            return {}, None
        try:
            return parse_du(self._du((option,), [path for path, _ in places], longest_s)), None
        except DuStopped as exc:
            numbers = parse_du(exc.text)
        # After the last path that was counted: one before it that has no number has been removed.
        at = max((place for place, (path, _) in enumerate(places) if path in numbers), default=-1)
        return numbers, places[min(at + 1, len(places) - 1)][1]

    def _mounts(self, nodefs: int) -> dict[str, bool]:
        """True: the place of a volume on another file system; False: a directory above one, below the pods'.

        ``du -x`` would ask each of these file systems once: one whose server is down would hide all pods' use.
        """
        mounts: dict[str, bool] = {}
        with (
            suppress(OSError),
            open(f"{self._root}/proc/1/mountinfo", encoding="utf-8", errors="surrogateescape", newline="\n") as file,
        ):
            for device, point in _MOUNT.findall(file.read(_MOST_MOUNTS)):
                path = f"{self._root}{point}"
                if device != f"{os.major(nodefs)}:{os.minor(nodefs)}" and path.startswith(f"{self._pods}/"):
                    mounts[path] = True
                    while (path := os.path.dirname(path)) != self._pods:
                        mounts.setdefault(path, False)
        return mounts

    def _mounted_by_host(self, process: str) -> bool:
        """Whether a process shares process 1's user namespace: in its own it mounts anything as its root."""
        try:
            try:
                first = os.readlink(f"{self._root}/proc/1/ns/user")
            except PermissionError:
                # Reading process 1's takes the right to trace it (namespaces(7)).
                first = os.readlink(f"{self._root}/proc/self/ns/user")
            return os.readlink(f"{process}/ns/user") == first
        except OSError:
            return False

    def _image_device(self) -> int | None:
        try:
            return None if self._images is None else os.stat(self._images).st_dev
        except OSError:
            return None  # the runtime keeps them somewhere else

    def _found(self, paths: Sequence[str]) -> Iterator[tuple[str, int]]:
        """Those that are there, with the layers that mount tables name, and the file system that each is on."""
        tables = set[str]()
        for path in paths:
            place: str | None = path
            try:
                if path.endswith("/mountinfo"):
                    process = path.removesuffix("/mountinfo")
                    # All processes of a container have one table, which a tenant can make long. The view of one that
                    # has changed its root has no root mount.
                    table = os.readlink(f"{process}/ns/mnt")
                    if table in tables or os.readlink(f"{process}/root") != "/" or not self._mounted_by_host(process):
                        continue
                    upper = _layer(path)
                    tables.add(table)
                    place = None if upper is None else f"{self._root}{upper}"
                if place is not None:
                    yield place, os.stat(place).st_dev
            except OSError:
                continue


def _layer(path: str) -> str | None:
    """`upper_directory` of a mount table. Line by line: a search in all of it keeps the interpreter for long."""
    left = _MOST_MOUNTS
    with open(path, encoding="utf-8", errors="surrogateescape", newline="\n") as file:
        while line := file.readline(left):
            if (upper := upper_directory(line)) is not None:
                return upper
            left -= len(line)
    return None
