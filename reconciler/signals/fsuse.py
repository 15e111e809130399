"""Each pod's use of the node's own file systems: its volumes there, its logs, its containers' top layers.

``du`` counts on the kubelet's file system, and on that of the images where it is a separate one: layers there have the
subject ``pod:UID@fs:imagefs``.

**Cost**: two processes a minute, which read the pods' directories. Source: kernel documentation,
filesystems/overlayfs; the kubelet's directories.
"""

import os
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
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
_LONGEST_S: Final = 120.0
"""``du`` is killed after so long."""
_HANGS_S: Final = 3 * _LONGEST_S
"""Both counts are over by then, unless a file system keeps ``du`` from being killed."""
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


def run_du(options: Sequence[str], paths: Sequence[str]) -> str:
    """Output of ``du``; files that vanish meanwhile are no error. Blocks. Errors: `OSError`."""
    try:
        # Walking a million files in a thread of the agent would delay the loop.
        done = subprocess.run(  # noqa: S603  (two programs of the system, with paths of the node's own)
            [*_DU, *options, "--", *paths],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=_ENVIRONMENT,
            timeout=_LONGEST_S,
            check=False,
        )
    except subprocess.TimeoutExpired as exc:
        raise TimeoutError(None, f"du did not finish within {duration(_LONGEST_S)}") from exc
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

    def __init__(self, shared: SharedReaders, du: Callable[[Sequence[str], Sequence[str]], str] = run_du) -> None:
        super().__init__(shared)
        means = shared.means
        images = means.filesystems.get("imagefs")
        self._processes = shared.processes
        self._root = means.root.rstrip("/")
        self._pods = f"{self._root}/{means.kubelet.strip('/')}/pods"
        self._logs = f"{self._root}/{_LOGS}"
        self._images = None if images is None else f"{self._root}/{images.strip('/')}"
        self._du = du
        self._job = BackgroundJob[dict[str, DirectoryUsage]]("fsuse")
        self._uses: Mapping[str, DirectoryUsage] = {}
        """By subject."""
        self._next_at = 0.0
        self._problem: str | None = None

    def problems(self) -> Mapping[str, str]:
        return dict.fromkeys(SIGNALS, self._problem) if self._problem else {}

    async def aclose(self) -> None:
        """A count under way is left to itself; it changes nothing."""

    async def read(self, scene: SampleContext, sheet: SampleSheet, now: float) -> None:
        try:
            directory_usages = self._job.take()
        except OSError as exc:
            self._problem = f"cannot count the pods' files: {exc.strerror}"
        else:
            if directory_usages is not None:
                self._uses, self._problem = directory_usages, None
            elif (busy_s := self._job.busy_s()) > _HANGS_S:
                self._problem = f"cannot count the pods' files: no answer for {duration(busy_s)}"
        at_s = self._clock()
        if at_s >= self._next_at and self._job.free:
            slices = TimeSlice()
            places: dict[str, Sequence[str]] = {}
            for uid, pod in scene.view.pods.items():
                places[uid] = tuple(self._places(pod, now))
                await slices.checkpoint()
            self._job.start(partial(self._count, places))
            self._next_at = at_s + _EVERY_S
        for uid in scene.view.pods:
            for subject in (pod_subject(uid), pod_at(uid, _IMAGES)):
                if (use := self._uses.get(subject)) is not None:
                    age_s = max(0.0, at_s - use.at_s)
                    sheet.put(subject, "fs.use", use.size, age_s=age_s)
                    sheet.put(subject, "fs.inodes_use", use.inodes, age_s=age_s)

    def _places(self, pod: Pod, now: float) -> Iterator[str]:
        """Where its files may be; a process's own mount table is left for the thread to read."""
        yield f"{self._pods}/{pod.uid}"
        if all(_NAME.fullmatch(name or "") for name in (pod.namespace, pod.name)):
            yield f"{self._logs}/{pod.namespace}_{pod.name}_{pod.uid}"
        for pid in self._processes.get(pod, now):
            yield f"{self._root}/proc/{pid}/mountinfo"

    def _count(self, places: Mapping[str, Sequence[str]]) -> dict[str, DirectoryUsage]:
        """In the thread. Errors: `OSError` when nothing can be counted."""
        at_s = self._clock()
        nodefs, imagefs = os.stat(self._pods).st_dev, self._image_device()
        mounts, chosen = self._mounts(nodefs), dict[str, list[str]]()
        for uid, paths in places.items():
            # One file system by both names is the first.
            subjects = {imagefs: pod_at(uid, _IMAGES), nodefs: pod_subject(uid)}
            # Each once: a layer is in the mount tables of all processes of its container.
            for path, device in sorted(set(self._found(paths))):
                # Volumes mounted from elsewhere and memory volumes fill neither file system.
                if device in subjects:
                    chosen.setdefault(subjects[device], []).extend(_without(path, mounts))
        everything = [path for paths in chosen.values() for path in paths]
        if not everything:
            return {}
        sizes, inodes = parse_du(self._du(("-B1",), everything)), parse_du(self._du(("--inodes",), everything))
        return {
            subject: DirectoryUsage(
                sum(sizes[path] for path in paths), sum(inodes.get(path, 0) for path in paths), at_s
            )
            for subject, paths in chosen.items()
            # A directory removed while it was counted makes the whole pod unknown: it may have been the largest.
            if all(path in sizes for path in paths)
        }

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
