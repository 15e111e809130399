"""The kubelet's part of a pod: its directories and their values, in the recorded order, with either cgroup driver.

Written without the naming code under test, so that a mistake there shows.

Source: recordings of a kubelet 1.22 (directories: cpuset first, values after the last of them; ``devices`` and the
cgroup2 tree are left to runc, and its pod directories in the latter are never removed); libcontainer's systemd driver.
"""

import contextlib
import os
import shutil
import subprocess
from typing import Final

from tests.e2e.mounts import KUBELET_ORDER, UNIFIED, directories, hierarchies, pure_v2, tree
from tests.e2e.pods import BEST_EFFORT, BURSTABLE, GUARANTEED, MIN_SHARES, PERIOD_US, PodSpec, pod_values, shares_of

CGROUPFS: Final = "cgroupfs"
SYSTEMD: Final = "systemd"

_QOS: Final = {BEST_EFFORT: ("besteffort",), BURSTABLE: ("burstable",), GUARANTEED: ()}
_PIDS_MAX: Final = 32768


def write(directory: str, name: str, value: object) -> None:
    """One control file; the kernel's refusal is the test's failure."""
    with open(os.path.join(directory, name), "w", encoding="utf-8") as file:
        file.write(str(value))


def read(directory: str, name: str) -> str:
    """One control file without its newline."""
    with open(os.path.join(directory, name), encoding="utf-8") as file:
        return file.read().strip()


def memory_total() -> int:
    """The machine's memory in bytes."""
    with open("/proc/meminfo", encoding="utf-8") as file:
        return int(file.readline().split()[1]) * 1024


class KubeletNames:
    """The group paths of the kubepods tree. ``cgroup_root`` is the kubelet's option of that name."""

    def __init__(self, *, driver: str = CGROUPFS, cgroup_root: str = "/") -> None:
        self.driver = driver
        self.cgroup_root = cgroup_root
        self._root_parts = tuple(part for part in cgroup_root.split("/") if part)

    def group(self, *parts: str) -> str:
        """The group path of a list of names below ``cgroup_root``, such as ``("kubepods", "burstable")``."""
        return self._path((*self._root_parts, *parts))

    def _path(self, parts: tuple[str, ...]) -> str:
        if self.driver == CGROUPFS:
            return "/" + "/".join(parts)
        escaped = [part.replace("-", "_") for part in parts]
        return "".join(f"/{'-'.join(escaped[: end + 1])}.slice" for end in range(len(escaped)))

    def pod_group(self, pod: PodSpec) -> str:
        """A pod's group path."""
        return self.group("kubepods", *_QOS[pod.qos], f"pod{pod.uid}")

    def cri_parent(self, pod: PodSpec) -> str:
        """The ``cgroup_parent`` of the CRI call."""
        group = self.pod_group(pod)
        return group if self.driver == CGROUPFS else os.path.basename(group)

    def container_group(self, pod: PodSpec, container_id: str) -> str:
        """A container's group path as the runtime names it."""
        name = container_id if self.driver == CGROUPFS else f"cri-containerd-{container_id}.scope"
        return f"{self.pod_group(pod)}/{name}"


class KubeletCgroups(KubeletNames):
    """Makes and removes the kubepods tree of this machine's kernel."""

    def __init__(self, *, driver: str = CGROUPFS, cgroup_root: str = "/") -> None:
        super().__init__(driver=driver, cgroup_root=cgroup_root)
        self.v2 = pure_v2()
        self._mounts = hierarchies()

    def directory(self, controller: str, group: str) -> str:
        """The directory of a group in one controller's hierarchy (the one hierarchy on v2)."""
        return self._mounts[UNIFIED if self.v2 else controller] + group

    def exists(self) -> bool:
        """True if some hierarchy holds a kubepods group."""
        return any(os.path.exists(mount + self.group("kubepods")) for mount in directories())

    def start(self) -> None:
        """What a kubelet does at start: kubepods and the two QoS groups."""
        for depth in range(1, len(self._root_parts) + 1):
            self._make(self._path(self._root_parts[:depth]))
        kubepods = self.group("kubepods")
        self._make(kubepods)
        self._set(kubepods, {"shares": 1024 * (os.cpu_count() or 1), "memory": memory_total(), "pids": _PIDS_MAX})
        for qos in (BURSTABLE, BEST_EFFORT):
            group = self.group("kubepods", *_QOS[qos])
            self._make(group)
            self._set(group, {"shares": MIN_SHARES})

    def make_pod(self, pod: PodSpec) -> str:
        """A pod's directory with its values; its group path."""
        group = self.pod_group(pod)
        self._make(group)
        self.set_pod(pod)
        return group

    def set_weights(self, burstable_milli: int) -> None:
        """The QoS groups' weights, by the sum of the burstable pods' CPU requests (thousandths of a CPU)."""
        self._set(self.group("kubepods", *_QOS[BURSTABLE]), {"shares": shares_of(burstable_milli)})
        self._set(self.group("kubepods", *_QOS[BEST_EFFORT]), {"shares": MIN_SHARES})

    def set_pod(self, pod: PodSpec) -> None:
        """The values of a pod's directory, also again after an in-place resize."""
        self._set(self.pod_group(pod), pod_values(pod))

    def remove_pod(self, pod: PodSpec) -> None:
        """A pod's directories, once its containers are gone. A hybrid node's cgroup2 one stays, as on a real node."""
        if self.driver == SYSTEMD:
            self._systemctl("stop", os.path.basename(self.pod_group(pod)))
        left_alone = self._mounts.get(UNIFIED) if not self.v2 else None
        for mount in directories():
            if mount != left_alone:
                self._remove_tree(mount + self.pod_group(pod))

    def stop(self) -> None:
        """Remove the whole tree in every hierarchy (the part of ``cgroup_root`` too). Its processes must be gone."""
        top = self._path(self._root_parts[:1] or ("kubepods",))
        if self.driver == SYSTEMD:
            self._systemctl("stop", os.path.basename(top))
        for mount in directories():
            self._remove_tree(mount + top)

    def _make(self, group: str) -> None:
        if self.driver == SYSTEMD:
            self._start_slice(group)
        if self.v2:
            self._make_v2(group)
            return
        made: set[str] = set()
        for name in KUBELET_ORDER:
            mount = self._mounts.get(name)
            if mount is None or mount in made:
                continue
            made.add(mount)
            os.makedirs(mount + group, exist_ok=True)
            if name == "cpuset":
                for file in ("cpuset.cpus", "cpuset.mems"):
                    if not read(mount + group, file):
                        write(mount + group, file, read(os.path.dirname(mount + group), file))

    def _make_v2(self, group: str) -> None:
        """The directory, with every controller handed down to it."""
        mount = self._mounts[UNIFIED]
        os.makedirs(mount + group, exist_ok=True)
        above = mount
        for part in group.strip("/").split("/"):
            for controller in read(above, "cgroup.controllers").split():
                # Some cannot be handed on (a machine without the devices for them); the kubelet continues too.
                with contextlib.suppress(OSError):
                    write(above, "cgroup.subtree_control", f"+{controller}")
            above = os.path.join(above, part)

    def _set(self, group: str, values: dict[str, int]) -> None:
        if "memory" in values:
            name = "memory.max" if self.v2 else "memory.limit_in_bytes"
            write(self.directory("memory", group), name, values["memory"])
        if "shares" in values:
            weight = 1 + (values["shares"] - 2) * 9999 // 262142
            name, value = ("cpu.weight", weight) if self.v2 else ("cpu.shares", values["shares"])
            if self.driver == SYSTEMD:
                # As libcontainer does: systemd writes its own value again with the next slice below this one.
                known = f"CPUWeight={value}" if self.v2 else f"CPUShares={value}"
                self._systemctl("set-property", "--runtime", os.path.basename(group), known)
            write(self.directory("cpu", group), name, value)
        if "quota" in values:
            if self.v2:
                write(self.directory("cpu", group), "cpu.max", f"{values['quota']} {PERIOD_US}")
            else:
                write(self.directory("cpu", group), "cpu.cfs_period_us", PERIOD_US)
                write(self.directory("cpu", group), "cpu.cfs_quota_us", values["quota"])
        if "pids" in values and ("pids" in self._mounts or self.v2):
            write(self.directory("pids", group), "pids.max", values["pids"])

    @staticmethod
    def _remove_tree(directory: str) -> None:
        for path in tree(directory):
            with contextlib.suppress(FileNotFoundError):
                os.rmdir(path)

    @staticmethod
    def _start_slice(group: str) -> None:
        """A transient slice, through systemd's own API, with the properties libcontainer asks for."""
        unit = os.path.basename(group)
        parent = os.path.basename(os.path.dirname(group)) or "-.slice"
        flags = ("MemoryAccounting", "CPUAccounting", "IOAccounting", "TasksAccounting")
        properties = [
            *("Description", "s", f"libcontainer container {unit}"),
            *("Wants", "as", "1", parent),
            *(word for flag in flags for word in (flag, "b", "true")),
            *("DefaultDependencies", "b", "false"),
        ]
        manager = ("org.freedesktop.systemd1", "/org/freedesktop/systemd1", "org.freedesktop.systemd1.Manager")
        # The root slice's name begins with a dash: what follows "--" is no option.
        call = ("busctl", "--", "call", *manager, "StartTransientUnit", "ssa(sv)a(sa(sv))", unit, "replace")
        count = str(2 + len(flags) + 1)
        done = subprocess.run([*call, count, *properties, "0"], check=False, capture_output=True, text=True)
        if done.returncode != 0 and "already" not in done.stderr:
            raise RuntimeError(f"systemd refuses {unit}: {done.stderr.strip()}")

    @staticmethod
    def _systemctl(*message: str) -> None:
        if shutil.which("systemctl"):
            subprocess.run(["systemctl", *message], check=False, capture_output=True)
