"""The agent of the demo: its private configuration, its process, and what its state document says, as typed values."""

import http.client
import json
from collections.abc import Iterator, Mapping
from typing import Any, Final, Protocol

from msgspec import Struct
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.agent import Agent
from tests.e2e.node import Node
from tests.fakes.daemonprocess import DaemonFailed

SECTIONS: Final = "agent,budget,pools,pods,settings,files,problems"

Json = Mapping[str, Any]  # the state document; its shape is documented in state.dump


class Wanted(Struct, frozen=True, kw_only=True):
    """One setting as the agent shows it."""

    knob: str
    wanted: object
    state: str
    reason: str


class Seen(Struct, frozen=True, kw_only=True):
    """One pod as the agent knows it. ``pool``: None for a system pod that runs everywhere."""

    pod_class: str
    source: str
    pool: str | None = None


class Start(Struct, frozen=True, kw_only=True):
    """One container start as the agent measured it. Units: seconds."""

    before_exec: bool | None
    seconds: float | None


class View(Struct, frozen=True, kw_only=True):
    """One state document, as far as the demo shows it."""

    mode: str
    budget_milli: int | None
    budget_reason: str
    pools: Mapping[str, str]
    """Pool name to CPU list; a container's own CPUs are ``dedicated/<uid>/<container>``."""
    reasons: Mapping[str, str]
    """Why a pool is as it is, by its name."""
    pods: Mapping[str, Seen]
    wanted: Mapping[str, Mapping[str, Wanted]]
    starts: Mapping[str, Start]
    files: int
    knobs: Mapping[str, int]
    writes: int
    foreign: Mapping[str, int]
    problems: tuple[str, ...]
    rss_bytes: int


class Undoing(Struct, frozen=True, kw_only=True):
    """The answer to a restore."""

    restored: int
    left: tuple[str, ...]


class Bypassd(Protocol):
    """The agent, wherever it runs."""

    def view(self) -> View: ...

    def restore(self) -> Undoing: ...

    def stop(self) -> object: ...


def configuration(node: Node, directory: str, *, cri_socket: str | None) -> dict[str, object]:
    """A configuration that touches nothing but this node."""
    return {
        "mode": "enforce",
        "operator_file": None,
        "node": {"cgroup_root": node.record.cgroup_root},
        "kubelet": {
            "root_dir": node.kubelet_root,
            "config_file": f"{node.kubelet_root}/config.yaml",
            "endpoint": "http",
        },
        "runtime": {
            "state_dir": f"{node.directory}/state",
            "runc_roots": [node.containerd.runc_root],
            **({"sockets": [cri_socket]} if cri_socket else {"cri": "off"}),
        },
        "store": {"path": f"{directory}/state.db"},
        "http": {"enabled": False, "socket": f"{directory}/agent.sock"},
    }


def fake_configuration(root: str) -> dict[str, object]:
    """A configuration for a node that lies below ``root`` with all its standard paths."""
    return {
        "mode": "enforce",
        "node": {"root": root},
        "operator_file": None,
        "kubelet": {"endpoint": "http"},
        "runtime": {"cri": "off"},
        "store": {"path": f"{root}/bypassd/state.db"},
        "http": {"enabled": False, "socket": None},
    }


DEMO: Final[Mapping[str, object]] = {"protect": "full", "policies": {"watermarks": {"enabled": False}}}
"""What a demo has beside the node: the watermarks are the whole machine's, which is not the demo's."""


def numbers_of(text: str) -> dict[str, dict[str, int]]:
    """Counters of a metrics text: name to the last label's value to the count."""
    numbers: dict[str, dict[str, int]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.endswith("_total"):
                label = next(reversed(sample.labels.values()), "")
                counts = numbers.setdefault(sample.name, {})
                counts[label] = counts.get(label, 0) + int(sample.value)
    return numbers


def view_of(document: Json, numbers: Mapping[str, Mapping[str, int]]) -> View:
    """The typed part of a state document, and the counters beside it."""
    agent, budget = document["agent"], document["budget"]
    pods = document["pods"]
    knobs: dict[str, int] = {}
    for entry in document["files"]:
        knobs[entry["knob"]] = knobs.get(entry["knob"], 0) + 1
    groups = dict(_groups(pods))
    for setting in document["settings"]:
        # The directories above the pods have settings, but no pod that shows their state.
        groups.setdefault(setting["path"], {}).setdefault(
            setting["knob"],
            Wanted(knob=setting["knob"], wanted=setting["value"], state="", reason=setting["reason"]),
        )
    return View(
        mode=agent["mode"],
        budget_milli=budget.get("budget_milli"),
        budget_reason=budget.get("reasons", {}).get("budget", ""),
        pools=document["pools"],
        reasons=budget.get("reasons", {}),
        pods={
            pod["uid"]: Seen(pod_class=pod["class"], source=pod["class_source"], pool=pod.get("pool")) for pod in pods
        },
        wanted=groups,
        starts={
            container["id"]: Start(
                before_exec=container["times"].get("before_exec"),
                seconds=container["times"].get("signal_to_last_write_s"),
            )
            for pod in pods
            for container in pod["containers"]
            if container["kind"] != "sandbox"
        },
        files=len(document["files"]),
        knobs=knobs,
        writes=sum(numbers.get("bypassd_writes_total", {}).values()),
        foreign=numbers.get("bypassd_foreign_writes_total", {}),
        problems=tuple(document["problems"]),
        rss_bytes=agent.get("rss_bytes", 0),
    )


def _groups(pods: list[Json]) -> Iterator[tuple[str, dict[str, Wanted]]]:
    for pod in pods:
        for path, settings in (
            (pod["group"], pod["settings"]),
            *((c["group"], c["settings"]) for c in pod["containers"]),
        ):
            yield (
                path,
                {
                    setting["knob"]: Wanted(
                        knob=setting["knob"], wanted=setting["wanted"], state=setting["state"], reason=setting["reason"]
                    )
                    for setting in settings
                },
            )


def undoing_of(document: Json) -> Undoing:
    """The typed part of a restore's answer."""
    left = [
        file for file in document["files"] if file["undo"] not in {"restored", "already as before", "its group is gone"}
    ]
    return Undoing(
        restored=document["restored"], left=tuple(f"{entry['path']}/{entry['file']}: {entry['undo']}" for entry in left)
    )


class BypassdProcess(Agent):
    """The daemon as its own process, as on a node; spoken to over its unix socket."""

    def __init__(self, node: Node, *, cri_socket: str | None, more: Mapping[str, object] = {}) -> None:
        directory = f"{node.directory}/bypassd"
        super().__init__({**configuration(node, directory, cri_socket=cri_socket), **more}, directory)

    def view(self) -> View:
        """Errors: `DaemonFailed` when it does not answer."""
        document = json.loads(self.ask("GET", f"/state?section={SECTIONS}"))
        return view_of(document, numbers_of(self.ask("GET", "/metrics").decode()))

    def restore(self) -> Undoing:
        """Put every file back. Errors: `DaemonFailed`."""
        return undoing_of(json.loads(self.ask("POST", "/restore", {"by": "the end of the demo"})))

    def ask(self, method: str, path: str, body: object = None) -> bytes:
        try:
            status, data = self.request(method, path, body)
        except (OSError, http.client.HTTPException) as exc:
            raise DaemonFailed(f"the agent does not answer {method} {path}: {exc}\n{self.tail()}") from exc
        if status != 200:
            raise DaemonFailed(f"the agent answers {method} {path} with {status}: {data[:500]!r}\n{self.tail()}")
        return data
