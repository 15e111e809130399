"""The node without a container runtime: its containers are own processes, started by tests/node/runc.py."""

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from tests.e2e.node import Node, Running, RunningPod
from tests.e2e.pods import PERIOD_US, ContainerSpec, PodSpec, quota_of, shares_of
from tests.e2e.programs import program
from tests.fakes.kubelet.fake import RuntimeFailed
from tests.fakes.oci import bundle

ROOT: Final = Path(__file__).parents[2]
WORK: Final = str(Path(__file__).with_name("work.py"))
PAUSE_SHARES: Final = 2
_COMPILED: Final = {
    **dict.fromkeys(("touch", "grow"), "memory"),
    **dict.fromkeys(("think", "reread", "fetch", "spin", "hoard", "flood"), "disturb"),
}
"""What is measured to the microsecond, or must not have an interpreter's memory beside its own, by mode: the program of
this directory that has it."""


def arguments(run: Sequence[str], out: str) -> list[str]:
    """The words after the program's name, for ``ContainerSpec.run``; ``out`` is where its files go."""
    mode, *rest = run
    if mode in {"sleep", "pause"}:
        return ["pause"]
    return [mode, f"{out}/{'service.sock' if mode == 'serve' else 'work'}", *rest]


def resources(spec: ContainerSpec, cpus: str) -> dict[str, Any]:
    """The OCI resources that a kubelet asks for."""
    cpu: dict[str, Any] = {"shares": shares_of(spec.cpu_request), "period": PERIOD_US}
    if spec.cpu_limit:
        cpu["quota"] = quota_of(spec.cpu_limit)
    if cpus:
        cpu["cpus"] = cpus
    return {"memory": {"limit": spec.memory_limit} if spec.memory_limit else {}, "cpu": cpu}


class ScriptedNode(Node):
    """A node whose containers are processes of the test."""

    whole_kubelet = True
    kind = "own processes, with runc's files, order and timing"

    def _start(self) -> None:
        for directory in (self.containerd.runc_root, self.containerd.bundles):
            os.makedirs(directory)
        # A container's first process outlives the runc that made it: it must become our child, not init's.
        _become_subreaper()
        self.cgroups.start()

    def _stop(self) -> None:
        self.kubelet.stop()
        self.remove_pods(list(self.pods.values()))

    def remove_pods(self, pods: list[RunningPod]) -> None:
        with ThreadPoolExecutor(max_workers=4) as pool:
            list(pool.map(self.remove_pod, pods))

    def _run_pod(self, pod: PodSpec) -> RunningPod:
        sandbox = secrets.token_hex(32)
        self._start_container(pod, sandbox, sandbox, None, ["sleep", "infinity"], {"cpu": {"shares": PAUSE_SHARES}})
        running = RunningPod(spec=pod, sandbox=sandbox, containers={})
        self.pods[pod.uid] = running
        started = {spec.name: self.run_container(running, spec) for spec in pod.containers}
        running = RunningPod(spec=pod, sandbox=sandbox, containers=started)
        self.pods[pod.uid] = running
        return running

    def run_container(self, pod: RunningPod, spec: ContainerSpec, *, attempt: int = 0) -> Running:
        out, cid = self.out_directory(pod.spec, spec.name), secrets.token_hex(32)
        shutil.rmtree(out, ignore_errors=True)
        os.makedirs(out)
        if spec.run[0] == "exec":
            parts = list(spec.run[1:])
        else:
            compiled = _COMPILED.get(spec.run[0])
            begin = [str(program(compiled))] if compiled is not None else [sys.executable, "-S", WORK]
            parts = [*begin, *arguments(spec.run, out)]
        fields = resources(spec, self.cpus.cpus_of(pod.spec, spec.name))
        self._start_container(pod.spec, pod.sandbox, cid, spec, parts, fields)
        return Running(node=self, pod=pod.spec, spec=spec, id=cid)

    def _start_container(
        self,
        pod: PodSpec,
        sandbox: str,
        cid: str,
        spec: ContainerSpec | None,
        parts: list[str],
        fields: dict[str, Any],
    ) -> None:
        directory = f"{self.containerd.bundles}/{cid}"
        os.mkdir(directory)
        config = bundle(
            uid=pod.uid,
            namespace=pod.namespace,
            pod=pod.name,
            group=self.cgroups.container_group(pod, cid),
            resources=fields,
            container=spec.name if spec is not None else "",
            sandbox=sandbox,
            args=parts,
        )
        with open(f"{directory}/config.json", "w", encoding="utf-8") as file:
            json.dump(config, file)
        try:
            self._runc("run", directory, cid)
        except KeyboardInterrupt:
            # What runs by then is in no list of containers, and the removal of its pod would wait for its end.
            self._end(self.cgroups.container_group(pod, cid))
            with contextlib.suppress(RuntimeFailed):
                self._runc("delete", directory, cid)
            raise

    def _update(self, pod: PodSpec, spec: ContainerSpec, container: str) -> None:
        path = f"{self.directory}/update-{container}.json"
        with open(path, "w", encoding="utf-8") as file:
            json.dump(resources(spec, self.cpus.cpus_of(pod, spec.name)), file)
        try:
            self._runc("update", container, path)
        finally:
            os.unlink(path)

    def _remove_pod(self, pod: RunningPod, *, grace_s: int) -> None:
        for cid in (*(running.id for running in pod.containers.values()), pod.sandbox):
            self._end(self.cgroups.container_group(pod.spec, cid))
            self._runc("delete", f"{self.containerd.bundles}/{cid}", cid)

    def _end(self, group: str, *, within_s: float = 10.0) -> None:
        """Kill what runs in a group; a process that forks meanwhile is found in the next round."""
        procs = f"{self.cgroups.directory('cpuset', group)}/cgroup.procs"
        deadline = time.monotonic() + within_s
        killed: set[int] = set()
        while True:
            try:
                with open(procs, encoding="utf-8") as file:
                    pids = [int(line) for line in file]
            except FileNotFoundError:
                pids = []
            # Children of a killed process are this process's as soon as it is gone: none may stay a zombie.
            for pid in killed:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
            if not pids:
                return
            if time.monotonic() > deadline:
                raise RuntimeFailed(f"processes {pids} in {group} do not end")
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            killed.update(pids)
            time.sleep(0.003)

    def _runc(self, *message: str) -> None:
        command = [sys.executable, "-S", "-m", "tests.node.runc", self.containerd.runc_root, *message]
        with open(f"{self.directory}/runc.log", "ab") as log:
            done = subprocess.run(command, cwd=ROOT, check=False, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        if done.returncode != 0:
            with open(f"{self.directory}/runc.log", encoding="utf-8", errors="replace") as log_text:
                raise RuntimeFailed(f"runc {message[0]}: {''.join(log_text.readlines()[-5:]).strip()}")


def _become_subreaper() -> None:
    import ctypes  # only this node needs it

    pr_set_child_subreaper = 36
    ctypes.CDLL(None).prctl(pr_set_child_subreaper, 1, 0, 0, 0)
