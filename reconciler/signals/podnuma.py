"""The NUMA node of each pod's anonymous memory, from its group's ``memory.numa_stat``.

The subject is the pod's part of that node, ``pod:UID@numa:0``.

**Cost**: one read a pod in five seconds. Source: kernel documentation, admin-guide/cgroup-v1/memory (5.6) and
admin-guide/cgroup-v2.
"""

import re
from typing import Final, final

from cgroupfs.codecs import PAGE
from cgroupfs.kept import GroupDirectories
from reconciler.runtime.cooperative import TimeSlice
from reconciler.signals.readers import BaseReader, SampleContext, SampleSheet, SharedReaders
from state.evidence import pod_at

SIGNALS: Final = ("memory.numa_rss",)
_EVERY_S: Final = 5.0
"""Not each pass: at a read the kernel adds up the counters of every group below, for each node."""
_FILE: Final = "memory.numa_stat"
# v1 counts pages, and its plain "anon" is of the group only, without what is below it.
_LINES: Final = {
    1: re.compile(r"^hierarchical_(anon|file)=\d+((?: N\d+=\d+)*) *$", re.MULTILINE),
    2: re.compile(r"^(anon|inactive_file|active_file|file_mapped)((?: N\d+=\d+)*) *$", re.MULTILINE),
}
_NODE: Final = re.compile(r"N(\d{1,4})=(\d{1,20})(?!\d)", re.ASCII)


def parse_numa_stat(text: str, version: int, page_bytes: int) -> dict[int, int]:
    """Bytes of anonymous memory by node, of the group and all below it.

    Errors: `ValueError` where the kernel does not report it.
    """
    numbers = _by_node(text, version, page_bytes)
    if "anon" not in numbers:
        raise ValueError(f"no line of anonymous memory in {text[:80]!r}")
    return numbers["anon"]


def parse_numa_cache(text: str, version: int, page_bytes: int) -> dict[int, int]:
    """Bytes of page cache by node that could be dropped; on v1, which does not separate them, with mapped pages.

    Errors: `ValueError` where the kernel does not report it.
    """
    numbers = _by_node(text, version, page_bytes)
    if version == 1 and "file" in numbers:
        return numbers["file"]
    try:
        unused, used, mapped = (numbers[name] for name in ("inactive_file", "active_file", "file_mapped"))
    except KeyError:
        raise ValueError(f"no lines of page cache in {text[:80]!r}") from None
    return {node: max(0, size + used.get(node, 0) - mapped.get(node, 0)) for node, size in unused.items()}


def _by_node(text: str, version: int, page_bytes: int) -> dict[str, dict[int, int]]:
    unit = page_bytes if version == 1 else 1
    return {
        name: {int(node): int(count) * unit for node, count in _NODE.findall(counts)}
        for name, counts in _LINES[version].findall(text)
    }


@final
class PodNuma(BaseReader):
    def __init__(self, shared: SharedReaders) -> None:
        super().__init__(shared)
        hierarchy = shared.means.hierarchy
        self._places = GroupDirectories(hierarchy, "memory")
        self._version = hierarchy.version("memory")
        self._last: dict[str, tuple[float, dict[int, int]]] = {}

    async def read(self, scene: SampleContext, sheet: SampleSheet, now: float) -> None:
        if self._version is None:
            self._problems = dict.fromkeys(SIGNALS, "no memory controller is mounted")
        # What this kernel does not report it will not report later either.
        if self._problems:
            return
        slices = TimeSlice()
        before, self._last = self._last, {}
        for uid, pod in scene.view.pods.items():
            last = before.get(uid)
            if last is None or now - last[0] >= _EVERY_S:
                last = self._read(pod.group.path)
                await slices.checkpoint()
            if last is None:
                continue
            self._last[uid] = last
            at_s, by_node = last
            # The whole of the pod is the same on a machine with one node.
            if len(by_node) > 1:
                for node, size in by_node.items():
                    sheet.put(pod_at(uid, f"numa:{node}"), "memory.numa_rss", size, age_s=max(0.0, now - at_s))

    def _read(self, path: str) -> tuple[float, dict[int, int]] | None:
        at_s = self._clock()
        try:
            text = self._files.read(self._places(path), _FILE)
            return at_s, parse_numa_stat(text, self._version or 0, PAGE)
        except OSError:
            # The pod was removed, or the kernel was built without NUMA: then there is one node.
            return None
        except ValueError:
            self._problems = dict.fromkeys(SIGNALS, f"no memory per NUMA node in {_FILE} on this kernel")
            return None
