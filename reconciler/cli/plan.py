"""``bypassctl plan``: what the agent would want and write on a captured node. Shape of the JSON: docs/plan.md."""

import os
import tarfile
import tempfile
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from cgroupfs.errors import SourceError
from reconciler import __version__
from reconciler.binder import ConfigError
from reconciler.cli import words
from reconciler.cli.asking import ask_node
from reconciler.cli.capture import reading
from reconciler.cli.exits import CliError, Exit
from reconciler.cli.nodeview import NodeView, look
from reconciler.cli.offline import Outlook, Standing, plan_node
from reconciler.cli.output import emit
from reconciler.cli.recorded import CriAnswers, Recorded, read_recorded
from reconciler.cli.screen import Block, Cell, Mark, Table, blank, field, head, line, show
from reconciler.cli.status import CLASSES
from reconciler.keeper import pod_facts, pool_lists

SCHEMA: Final = 1
_INTERVAL_S: Final = 1.0


def run(options: Namespace) -> int:
    """Plan and show. Errors: `CliError` when there is nothing to plan for."""
    with _unpacked(options.root) as root:
        options.root = root
        try:
            node = look(options, strict=True)
            told = read_recorded(node.root) if node.copied else ask_live(node)
            document = describe(node, told, plan_node(node, told))
        except ConfigError as exc:
            raise CliError(str(exc), Exit.USAGE) from exc
        except SourceError as exc:
            raise CliError(f"{root}: {exc}", Exit.UNREACHABLE) from exc
    if options.output == "table":
        show(_blocks(document))
    else:
        emit(document, options.output)
    return Exit.OK


def ask_live(node: NodeView) -> Recorded:
    """The same answers from a node that lives: what the agent would do here, before it is installed."""
    first = reading(node)
    asked = ask_node(node)
    time.sleep(_INTERVAL_S)
    readings = [one for one in (first, reading(node)) if one is not None]
    return Recorded(
        kubelet=asked.kubelet_pods if asked.kubelet_body is not None else None,
        cri=None if asked.cri_version is None else CriAnswers(version=asked.cri_version, pods=asked.cri_pods),
        usage=tuple(readings),
        problems=tuple(one for one in (asked.kubelet_problem, asked.cri_problem) if one),
    )


def describe(node: NodeView, told: Recorded, found: Outlook) -> dict[str, Any]:
    """The plan as the documented, stable document: plain values, keys are added but never renamed."""
    pools, knowledge = found.desired.pools, found.knowledge
    cpu = knowledge.cpu
    assert node.hierarchy is not None
    return {
        "schema": SCHEMA,
        "kind": "bypassd-plan",
        "version": __version__,
        "at": time.time(),
        "captured_at": told.about.at if told.about is not None else None,
        "node": {
            "name": _name(node, told),
            "mode": node.config.mode.value,
            "cgroups": node.hierarchy.mode.value,
            "driver": knowledge.layout.driver.value,
            "kubepods": knowledge.layout.kubepods,
            "cpus": str(knowledge.topology.online),
            "kubelet_policy": knowledge.kubelet.policy.value,
        },
        "sources": dict(found.sources),
        "pools": pool_lists(pools),
        "budget": {
            "budget_milli": pools.budget_milli,
            "quota_milli": dict(pools.quota_milli or {}),
            "reasons": dict(pools.reasons),
            "used": None
            if cpu is None
            else {
                "busy_milli": cpu.busy_milli,
                "online_milli": cpu.online_milli,
                "reclaimed_milli": cpu.reclaimed_milli,
                "system_milli": cpu.system_milli,
            },
        },
        "pods": [pod_facts(pod) for _, pod in sorted(knowledge.pods.items())],
        "settings": [_setting(one) for one in found.standings],
        "refusals": [
            {
                "path": one.setting.path,
                "knob": one.setting.knob,
                "value": _plain(one.setting.value),
                "pod_uid": one.setting.pod_uid,
                "rule": one.rule,
                "reason": one.reason,
            }
            for one in found.desired.refusals
        ],
        "writes": [
            {
                "controller": step.controller,
                "path": step.path,
                "file": step.file,
                "text": step.text,
                "slow": step.slow,
                "why": step.why,
            }
            for step in found.writes.steps
        ],
        "problems": list(found.problems),
    }


def _name(node: NodeView, told: Recorded) -> str:
    if told.about is not None:
        return told.about.node
    return node.kubelet.node_name or ("a copied node" if node.copied else os.uname().nodename)


def _setting(one: Standing) -> dict[str, Any]:
    return {
        "path": one.setting.path,
        "knob": one.setting.knob,
        "value": _plain(one.setting.value),
        "wanted": one.wanted,
        "actual": one.actual,
        "state": one.state,
        "detail": one.detail,
        "policy": one.setting.policy,
        "reason": one.setting.reason,
        "pod_uid": one.setting.pod_uid,
        "container_id": one.setting.container_id,
    }


def _plain(value: object) -> object:
    return value if value is None or isinstance(value, int) else str(value)


@contextmanager
def _unpacked(root: str) -> Iterator[str]:
    """The tree itself; an archive is unpacked for as long as it is needed."""
    if not os.path.exists(root):
        raise CliError(f"{root}: no such directory or archive", Exit.USAGE)
    if os.path.isdir(root):
        yield os.path.abspath(root)
        return
    with tempfile.TemporaryDirectory(prefix="bypassd-plan-") as directory:
        try:
            with tarfile.open(root) as archive:
                archive.extractall(directory, filter="data")
        except (tarfile.TarError, OSError, EOFError) as exc:
            raise CliError(f"{root}: cannot be unpacked: {exc}", Exit.USAGE) from exc
        yield directory


# The screen


def _blocks(found: dict[str, Any]) -> Iterator[Block]:
    node = found["node"]
    when = f", captured {words.clock(found['captured_at'])}" if found["captured_at"] else ""
    yield line(Mark(f"plan for {node['name']}", "head"), f"{when}; configured mode {node['mode']}")
    yield line(
        Mark(
            f"kubelet {node['kubelet_policy']}, cgroups {node['cgroups']}/{node['driver']}, CPUs {node['cpus']}; "
            + ", ".join(f"{name}: {told}" for name, told in found["sources"].items()),
            "dim",
        )
    )
    counts = Counter(pod["class"] for pod in found["pods"])
    yield line(f"pods: {', '.join(f'{name} {counts[name]}' for name in CLASSES)}")
    yield blank()
    yield Table(("POOL", "CPUS"), [(name, words.text(cpus)) for name, cpus in found["pools"].items()])
    budget = found["budget"]
    yield blank()
    yield field("CPU", f"BE may use {words.cpus(budget['budget_milli'])} CPUs: {budget['reasons'].get('budget', '')}")
    titles = {pod["group"]: pod["title"] for pod in found["pods"]}
    if found["settings"]:
        yield blank()
        yield head("wanted")
        rows: list[tuple[Cell, ...]] = [
            (
                one["knob"],
                words.text(one["wanted"]),
                words.text(one["actual"]),
                Mark(one["state"], "ok" if one["state"] == "in place" else "warn"),
                _where(one, titles),
            )
            for one in found["settings"]
        ]
        yield Table(("KNOB", "WANTED", "ACTUAL", "STATE", "WHERE"), rows)
    for one in found["refusals"]:
        yield blank()
        yield line(
            Mark("refused ", "warn"), f"{one['knob']} = {words.text(one['value'])} ({one['rule']}): {one['reason']}"
        )
    yield blank()
    if found["writes"]:
        yield head(f"writes, in this order ({len(found['writes'])})")
        steps = [
            (one["file"], one["text"], f"{words.place(one['path'], titles)}{' (slow)' if one['slow'] else ''}")
            for one in found["writes"]
        ]
        yield Table(("FILE", "TEXT", "WHERE"), steps)
    else:
        yield line(Mark("nothing to write", "ok"))
    for problem in found["problems"]:
        yield line(Mark("! ", "bad"), problem)


def _where(one: dict[str, Any], titles: dict[str, str]) -> str:
    place = words.place(one["path"], titles)
    return f"{place}: {one['detail']}" if one["detail"] else place
