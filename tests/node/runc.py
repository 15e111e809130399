"""What runc does to one container, with its order, its timing and its files, for nodes without a real runtime.

    python -S -m tests.node.runc ROOT run BUNDLE ID      create and start
    python -S -m tests.node.runc ROOT update ID FILE     FILE: OCI resources as JSON
    python -S -m tests.node.runc ROOT delete BUNDLE ID   after the exit: thaw, remove the groups, bundle and state

It is a process of its own, named ``runc``, so that the writer of a control file is found correctly;
the container's first process is called ``runc:[2:INIT]`` until it becomes the program. There are no namespaces: the
container is an ordinary process in the right groups. Standard library only, so that it starts in a few milliseconds.

Source: kernel trace of runc 1.1.5 under containerd 1.6 on cgroup v1 (medians of starts one at a time); for v2
libcontainer's ``fs2`` manager.
"""

import contextlib
import ctypes
import json
import os
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

from tests.e2e.mounts import KUBELET_ORDER, UNIFIED, hierarchies

# Milliseconds after the mkdir of the container's cpuset directory. A step that takes longer by itself is not hurried.
ATTACHED_MS: Final = 9.4
OTHERS_MS: Final = 10.8
SET_MS: Final = 20.7
STATE_MS: Final = 22.7
INIT_PID_MS: Final = 26.7
EXEC_MS: Final = 34.6
UPDATE_MS: Final = 8.0
"""Start of the program ``runc update`` to its first write."""

INIT_NAME: Final = "runc:[2:INIT]"
NAME: Final = "runc"

Json = Mapping[str, Any]  # decoded OCI configuration; its shape is the specification's


class Hands(Protocol):
    """What runc does to a kernel: the real one or the strict fake one."""

    def mkdir(self, path: str) -> None: ...

    def rmdir(self, path: str) -> None: ...

    def read(self, directory: str, file: str) -> str: ...

    def write(self, directory: str, file: str, text: str) -> None: ...


class RealHands:
    """The running kernel."""

    def mkdir(self, path: str) -> None:
        os.mkdir(path)

    def rmdir(self, path: str) -> None:
        os.rmdir(path)

    def read(self, directory: str, file: str) -> str:
        with open(f"{directory}/{file}", encoding="utf-8") as control:
            return control.read()

    def write(self, directory: str, file: str, text: str) -> None:
        with open(f"{directory}/{file}", "w", encoding="utf-8") as control:
            control.write(text)


class Value(NamedTuple):
    """One control file that the specification asks for."""

    controller: str
    file: str
    text: str


class Pace:
    """Waits until so many milliseconds after the start; ``scale`` 0 does not wait at all."""

    def __init__(self, scale: float = 1.0) -> None:
        self._scale = scale
        self._began = time.monotonic()

    def until(self, milliseconds: float) -> None:
        rest = self._began + milliseconds * self._scale / 1000 - time.monotonic()
        if rest > 0:
            time.sleep(rest)


def directories(mounts: Mapping[str, str]) -> list[tuple[str, str]]:
    """(controller, mount directory) in runc's order: cpuset, devices, then as the kubelet; each directory once."""
    order = ("cpuset", "devices", *(name for name in KUBELET_ORDER if name != "cpuset"), UNIFIED)
    texts: dict[str, str] = {}
    for name in order:
        if name in mounts and mounts[name] not in texts.values():
            texts[name] = mounts[name]
    return list(texts.items())


def pure_v2(mounts: Mapping[str, str]) -> bool:
    """True where the one cgroup2 hierarchy has the controllers."""
    return not {"cpu", "cpuset", "memory"} & mounts.keys()


SWAP = frozenset({"memory.memsw.limit_in_bytes", "memory.swap.max"})
"""A kernel without swap accounting has no such files."""


def values(resources: Json, *, v2: bool, has_bytes: int = 0) -> list[Value]:
    """The control files that runc's "set" writes for OCI resources, in its order; only what was requested.

    containerd's limit bounds memory and swap together. ``has_bytes``: the present limit of v1, by which runc orders
    the two.
    """
    cpu, memory = resources.get("cpu") or {}, resources.get("memory") or {}
    shares, quota, period = (cpu.get(name) for name in ("shares", "quota", "period"))
    result = [Value("cpuset", "cpuset.cpus", cpu["cpus"])] if cpu.get("cpus") else []
    limit = memory.get("limit")
    if v2:
        if shares:
            result.append(Value("cpu", "cpu.weight", str(1 + (shares - 2) * 9999 // 262142)))
        if quota or period:
            result.append(Value("cpu", "cpu.max", f"{quota if quota and quota > 0 else 'max'} {period or 100_000}"))
        if limit:
            result.append(Value("memory", "memory.swap.max", "0"))
            result.append(Value("memory", "memory.max", str(limit)))
        return result
    if limit:
        pair = [Value("memory", f"memory.{name}limit_in_bytes", str(limit)) for name in ("", "memsw.")]
        result += pair[::-1] if has_bytes < limit else pair
    if shares:
        result.append(Value("cpu", "cpu.shares", str(shares)))
    if period:
        result.append(Value("cpu", "cpu.cfs_period_us", str(period)))
    if quota:
        result.append(Value("cpu", "cpu.cfs_quota_us", str(quota)))
    return result


class Runtime:
    """The steps, on some kernel's hands. ``group`` is a group path, ``mounts`` as `hierarchies` gives them."""

    def __init__(self, hands: Hands, mounts: Mapping[str, str], *, scale: float = 1.0) -> None:
        self._hands = hands
        self._mounts = mounts
        self._places = directories(mounts)
        self.v2 = pure_v2(mounts)
        self._scale = scale

    def create(self, group: str, resources: Json, pid: int) -> Pace:
        """Make the groups, put the process into them, set the values."""
        if self.v2:
            return self._create_v2(group, resources, pid)
        pace = Pace(self._scale)
        controller, mount = self._places[0]
        self._make(mount, group)
        if controller == "cpuset":
            self._fill_cpuset(mount + group, resources)
        self._hands.write(mount + group, "cgroup.procs", str(pid))
        pace.until(ATTACHED_MS)
        for controller, mount in self._places[1:]:
            self._make(mount, group)
            self._hands.write(mount + group, "cgroup.procs", str(pid))
            if controller == "devices":
                pace.until(OTHERS_MS)
        pace.until(SET_MS)
        self.set(group, resources)
        return pace

    def _create_v2(self, group: str, resources: Json, pid: int) -> Pace:
        pace = Pace(self._scale)
        mount = self._mounts[UNIFIED]
        pod = mount + os.path.dirname(group)
        for controller in self._hands.read(pod, "cgroup.controllers").split():
            with contextlib.suppress(OSError):
                self._hands.write(pod, "cgroup.subtree_control", f"+{controller}")
        self._make(mount, group)
        self._hands.write(mount + group, "cgroup.procs", str(pid))
        pace.until(SET_MS)
        self.set(group, resources)
        return pace

    def set(self, group: str, resources: Json) -> None:
        """Write what the specification asks for. A machine without swap accounting has no memsw file."""
        has = 0
        if not self.v2:
            with contextlib.suppress(FileNotFoundError):
                has = int(self._hands.read(self._mounts["memory"] + group, "memory.limit_in_bytes"))
        for value in values(resources, v2=self.v2, has_bytes=has):
            directory = self._mounts[UNIFIED if self.v2 else value.controller] + group
            try:
                self._hands.write(directory, value.file, value.text)
            except FileNotFoundError:
                if value.file not in SWAP:
                    raise
            if value.file == "cpu.shares":
                self._check_shares(directory, int(value.text))

    def _check_shares(self, directory: str, shares: int) -> None:
        """runc reads its weight back: a value that was changed in between fails the start or the update."""
        number = int(self._hands.read(directory, "cpu.shares"))
        if number != shares:
            raise ValueError(f"the {'maximum' if shares > number else 'minimum'} allowed cpu-shares is {number}")

    def remove(self, group: str) -> None:
        """After the exit: freeze, thaw, then remove every directory in random order."""
        freezer = self._mounts.get("freezer")
        if freezer is not None and not self.v2:
            for state in ("FROZEN", "THAWED"):
                with contextlib.suppress(OSError):
                    self._hands.write(freezer + group, "freezer.state", state)
        places = [mount for _, mount in self._places]
        random.shuffle(places)
        for mount in places:
            self._remove(mount + group)

    def _remove(self, directory: str, *, within_s: float = 5.0) -> None:
        deadline = time.monotonic() + within_s
        while True:
            try:
                self._hands.rmdir(directory)
            except FileNotFoundError:
                return
            except OSError:
                # The last process is gone from the process table a moment before it is gone from its groups.
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.002)
            else:
                return

    def _make(self, mount: str, group: str) -> None:
        """The directory and what is missing above it: ``devices`` and ``unified`` have none from the kubelet."""
        parts = group.strip("/").split("/")
        for depth in range(1, len(parts) + 1):
            with contextlib.suppress(FileExistsError):
                self._hands.mkdir(f"{mount}/{'/'.join(parts[:depth])}")

    def _fill_cpuset(self, directory: str, resources: Json) -> None:
        """The specification's CPUs at once, else a copy of the parent's: nothing can be attached before."""
        cpu, above = resources.get("cpu") or {}, os.path.dirname(directory)
        for file, message in (("cpuset.cpus", cpu.get("cpus")), ("cpuset.mems", cpu.get("mems"))):
            self._hands.write(directory, file, message or self._hands.read(above, file).strip())


def state(container: str, pid: int, config: Json, mounts: Mapping[str, str], bundle: str) -> dict[str, Any]:
    """runc's state.json as far as anybody reads it: flat keys, zero for what is not set."""
    resources = config["linux"].get("resources") or {}
    cpu, memory = resources.get("cpu") or {}, resources.get("memory") or {}
    path = config["linux"]["cgroupsPath"]
    cgroups = {
        "path": path,
        "scope_prefix": "",
        "memory": memory.get("limit", 0),
        "memory_reservation": 0,
        "memory_swap": memory.get("limit", 0),
        "cpu_shares": cpu.get("shares", 0),
        "cpu_quota": cpu.get("quota", 0),
        "cpu_period": cpu.get("period", 0),
        "cpuset_cpus": cpu.get("cpus", ""),
        "cpuset_mems": cpu.get("mems", ""),
        "pids_limit": 0,
        "unified": None,
        "Systemd": False,
        "Rootless": False,
    }
    labels = [f"{key}={value}" for key, value in config["annotations"].items()]
    names = {UNIFIED: "", "systemd": "name=systemd"}
    return {
        "id": container,
        "init_process_pid": pid,
        "config": {"cgroups": cgroups, "labels": [*labels, f"bundle={bundle}"]},
        "rootless": False,
        "cgroup_paths": {names.get(name, name): mount + path for name, mount in directories(mounts)},
        "intel_rdt_path": "",
    }


def rename_in(path: str, text: str) -> None:
    """Write beside and rename into place: what a watcher of the directory sees as MOVED_TO."""
    directory, name = os.path.split(path)
    temporary = f"{directory}/.{name}"
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
    os.rename(temporary, path)


def read_json(path: str) -> dict[str, Any]:
    with open(path, "rb") as file:
        fields: dict[str, Any] = json.load(file)
        return fields


@contextlib.contextmanager
def _init(arguments: list[str]) -> Iterator[tuple[int, int]]:
    """Fork the container's first process: it waits under runc's name for a byte, then becomes the program."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        _name_process(INIT_NAME)
        os.close(writer)
        if not os.read(reader, 1):
            os._exit(1)
        os.execvp(arguments[0], arguments)
    os.close(reader)
    try:
        yield pid, writer
    finally:
        os.close(writer)


def _name_process(name: str) -> None:
    pr_set_name = 15
    ctypes.CDLL(None).prctl(pr_set_name, name.encode(), 0, 0, 0)


def run(root: str, bundle: str, container: str) -> None:
    """Create and start. The program is on its way to its exec when this returns."""
    config = read_json(f"{bundle}/config.json")
    mounts = hierarchies()
    runtime = Runtime(RealHands(), mounts)
    with _init(config["process"]["args"]) as (pid, go):
        pace = runtime.create(config["linux"]["cgroupsPath"], config["linux"].get("resources") or {}, pid)
        os.makedirs(f"{root}/{container}", exist_ok=True)
        pace.until(STATE_MS)
        rename_in(f"{root}/{container}/state.json", json.dumps(state(container, pid, config, mounts, bundle)))
        pace.until(INIT_PID_MS)
        rename_in(f"{bundle}/init.pid", str(pid))
        pace.until(EXEC_MS)
        os.write(go, b"x")


def update(root: str, container: str, resources_file: str) -> None:
    """Write the given resources and record them: what the kubelet's CPU manager makes of a reconcile tick."""
    path = f"{root}/{container}/state.json"
    known, resources = read_json(path), read_json(resources_file)
    cgroups = known["config"]["cgroups"]
    Pace().until(UPDATE_MS)
    Runtime(RealHands(), hierarchies()).set(cgroups["path"], resources)
    cpu, memory = resources.get("cpu") or {}, resources.get("memory") or {}
    message = {
        "cpuset_cpus": cpu.get("cpus"),
        "cpu_shares": cpu.get("shares"),
        "cpu_quota": cpu.get("quota"),
        "cpu_period": cpu.get("period"),
        "memory": memory.get("limit"),
        "memory_swap": memory.get("limit"),
    }
    cgroups.update({key: value for key, value in message.items() if value})
    rename_in(path, json.dumps(known))


def delete(root: str, bundle: str, container: str) -> None:
    """Remove all that there is of a container that has exited."""
    known = read_json(f"{root}/{container}/state.json")
    Runtime(RealHands(), hierarchies()).remove(known["config"]["cgroups"]["path"])
    for directory in (f"{root}/{container}", bundle):
        for name in os.listdir(directory):
            os.unlink(f"{directory}/{name}")
        os.rmdir(directory)


def main(parts: Sequence[str]) -> None:
    _name_process(NAME)
    root, command, *rest = parts
    {"run": run, "update": update, "delete": delete}[command](root, *rest)


if __name__ == "__main__":
    main(sys.argv[1:])
