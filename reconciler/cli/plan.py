"""``bypassctl plan``: the agent's plan and writes on a captured node, or its plan for a described machine.

Shape of the JSON: docs/plan.md.
"""

import os
import tempfile
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

from msgspec import Struct

from cgroupfs.errors import InputError, SourceError
from cgroupfs.files import REAL, FileOps
from cgroupfs.hierarchy import HierarchyMode
from reconciler import __version__
from reconciler.cli import places
from reconciler.cli.archive import unpack
from reconciler.cli.asking import query_node
from reconciler.cli.capture import reading
from reconciler.cli.diff import settings_table
from reconciler.cli.drawing import as_sets, draw, marks, placement
from reconciler.cli.exits import CliError, Exit
from reconciler.cli.format import file_text, group_title, setting_text, value_text
from reconciler.cli.nodeview import InspectedNode, inspect_node, marks_of
from reconciler.cli.offline import OfflineSetting, PlanResult, plan_node
from reconciler.cli.podsfile import LAYOUT, plan_machine, read_pods_file
from reconciler.cli.recorded import CriAnswers, RecordedNode, read_recorded
from reconciler.cli.screen import Block, Cell, StyledText, Table, blank, field, head, line, present, section
from reconciler.cli.status import CLASSES
from reconciler.cli.termination import Termination
from reconciler.config import load
from reconciler.placement.claims import cpu_claims, plain
from reconciler.runtime import format as fmt
from reconciler.runtime import streams
from state.cache import RESCTRL_GROUP
from state.cpu import CORE_COOKIE, INTERRUPTS, THREAD_POLICY
from state.machine import describe as machine_text
from state.machine import parse
from state.memory import OOM_SCORE
from state.summary import budget_facts, pod_facts, pool_lists, resource_facts


def blocks(fields: dict[str, Any]) -> Iterator[Block]:
    node = fields["node"]
    when = f", captured {fmt.clock(fields['captured_at'])}" if fields["captured_at"] else ""
    yield line(StyledText(f"plan for {node['name']}", "head"), f"{when}; configured mode {node['mode']}")
    yield line(StyledText(f"configuration: {node['config']}", "dim"))
    yield line(
        StyledText(
            f"cgroups {node['cgroups']}/{node['driver']}, CPU manager {node['kubelet_policy']}; "
            + ", ".join(f"{name}: {message}" for name, message in fields["sources"].items()),
            "dim",
        )
    )
    counts = Counter(pod["class"] for pod in fields["pods"])
    yield line(f"pods: {', '.join(f'{name} {counts[name]}' for name in CLASSES)}")
    yield field("machine", node["machine"] or f"CPUs {node['cpus']}")
    yield blank()
    yield from draw(fields["placement"], fields["pools"], streams.columns())
    letters, names = marks(fields["pools"]), {pod["uid"]: pod["title"] for pod in fields["pods"]}
    yield Table(
        ("", "POOL", "CPUS"),
        [(letters[name], _pool(name, names), value_text(fields["pools"][name])) for name in letters],
        names=1,
    )
    claims = [_claim(claim, names) for claim in fields["claims"] if claim["asked"]]
    yield from section("claims on CPUs", Table(("CLAIM", "ASKED", "GOT", "NUMA", "RULE"), claims, names=0))
    budget = fields["budget"]
    yield blank()
    yield field("CPU", f"BE budget {fmt.cpu(budget['budget_milli'])}: {budget['reasons'].get('budget', '')}")
    if limited := budget["reasons"].get("cpus"):
        yield field("", f"pods have {limited}")
    titles = {pod["group"]: pod["title"] for pod in fields["pods"]}
    titles |= {
        setting["path"]: f"{titles[above]}/{setting['container']}"
        for setting in fields["settings"]
        if setting["container"] and (above := setting["path"].rpartition("/")[0]) in titles
    }
    rows = sorted(fields["settings"], key=lambda setting: group_title(setting["path"], titles))
    settings = settings_table(rows, lambda setting: group_title(setting["path"], titles))
    yield from section("settings", settings)
    yield from resources(fields["resources"], titles, names)
    for refusal in fields["refusals"]:
        yield blank()
        value = setting_text(refusal["knob"], refusal["value"])
        text = f"{refusal['knob']} = {value} ({refusal['rule']}): {refusal['reason']}"
        yield line(StyledText("refused ", "warn"), text)
    yield blank()
    if node["described"]:
        yield line(StyledText("described machine: there are no files to compare or write", "dim"))
    elif fields["writes"]:
        yield head(f"writes in this order ({len(fields['writes'])})")
        steps = [
            (
                write["file"],
                file_text(write["file"], write["text"]),
                f"{group_title(write['path'], titles)}{' (slow)' if write['slow'] else ''}",
            )
            for write in fields["writes"]
        ]
        yield Table(("FILE", "VALUE", "GROUP"), steps, names=2)
    else:
        yield line(StyledText("nothing to write", "ok"))
    for problem in fields["problems"]:
        yield line(StyledText("! ", "bad"), problem)
    marked: dict[str, list[str]] = {}
    for pod in fields["pods"]:
        for text in pod["unobeyed"]:
            marked.setdefault(text, []).append(pod["title"])
    for text, names_of in sorted(marked.items()):
        count = (
            f" ({fmt.plural(len(names_of), 'pod')}, such as {names_of[0]})"
            if len(names_of) > 1
            else f" ({names_of[0]})"
        )
        yield line(StyledText("- ", "warn"), text, count)


def _claim(claim: dict[str, Any], names: dict[str, str]) -> tuple[Cell, ...]:
    got = StyledText(str(claim["got"]), "bad" if claim["cut"] else "ok")
    where = ",".join(map(str, claim["nodes"]))
    return _pool(claim["owner"], names), str(claim["asked"]), got, where, claim["rule"]


def resources(fields: dict[str, Any], titles: dict[str, str], names: dict[str, str]) -> Iterator[Block]:
    """What is planned beside the CPUs and the control files. ``titles``: pods' by group path; ``names``: by uid."""
    active = [(policy, reason) for policy, reason in fields["reasons"].items() if reason != "off"]
    yield from section("memory, disk, network, cache, threads", Table(("POLICY", "PLAN"), active))
    targets = Table(("KNOB", "WANTED", "WHERE"), [*_targets(fields, titles, names)], names=2)
    yield from section("wanted beside the control files", targets)
    cache = fields["cache"] or {}
    groups = [(name, "; ".join(item["schemata"]), item["reason"]) for name, item in (cache.get("groups") or {}).items()]
    yield from section("resctrl groups", Table(("GROUP", "SCHEMATA", "FOR"), groups))
    for problem in cache.get("problems", ()):
        yield line(StyledText("! ", "bad"), f"cache: {problem}")


def _targets(fields: dict[str, Any], titles: dict[str, str], names: dict[str, str]) -> Iterator[tuple[Cell, ...]]:
    for path, score in (fields["oom_scores"] or {}).get("scores", {}).items():
        yield OOM_SCORE, str(score), group_title(path, titles)
    for path, policy in (fields["idle_threads"] or {}).get("policies", {}).items():
        yield THREAD_POLICY, policy, group_title(path, titles)
    for path, group in (fields["cookies"] or {}).get("groups", {}).items():
        yield CORE_COOKIE, group, group_title(path, titles)
    for uid, group in (fields["cache"] or {}).get("members", {}).items():
        yield RESCTRL_GROUP, group, names.get(uid, uid)
    for name, file in fields["files"].items():
        yield name, "-" if file["value"] is None else str(file["value"]), "the machine"
    if (places := fields["interrupts"]) is not None and places["avoid"]:
        yield INTERRUPTS, f"not CPU {places['avoid']}", "the machine"


def _pool(name: str, titles: dict[str, str]) -> str:
    """The pool of a container's or a pod's own by the name of the pod, where that is known."""
    kind, _, owner = name.partition("/")
    uid, _, container = owner.partition("/")
    if kind == "isolation":
        return f"{kind} {titles.get(uid, uid)}"
    return f"{kind} {titles.get(uid, uid)}/{container}" if kind == "dedicated" else name


SCHEMA: Final = 1
_INTERVAL_S: Final = 1.0
_WRITE: Final = ("controller", "path", "file", "text", "slow", "why")


class PlanSubject(Struct, frozen=True, kw_only=True):
    """What the plan is for. ``described``: a described machine, which has no actual values.

    ``config``: the files of the agent's configuration; of a capture's as they were named on the node.
    """

    name: str
    mode: str
    cgroups: str
    driver: str
    config: str
    captured_at: float | None = None
    described: bool = False


def run(options: Namespace) -> int:
    """Plan and show. Errors: `CliError` when there is nothing to plan for."""
    if options.pods is not None and options.machine is None:
        raise CliError("--pods requires --machine", Exit.USAGE)
    document = _node(options) if options.machine is None else _machine(options)
    present(options.output, document, blocks(document))
    return Exit.OK


def _node(options: Namespace) -> dict[str, Any]:
    with _unpacked(options.root) as (root, files):
        options.root = root
        try:
            node = inspect_node(options, strict=True)
            recorded_node = read_recorded(node.root, marks_of(node.config)) if node.copied else ask_live(node)
            result = plan_node(node, recorded_node, files=files)
        except SourceError as exc:
            raise CliError(f"{root}: {exc}", Exit.UNREACHABLE) from exc
        assert node.hierarchy is not None
        assert node.layout is not None
        about = PlanSubject(
            name=_name(node, recorded_node),
            mode=node.config.mode.value,
            cgroups=node.hierarchy.mode.value,
            driver=node.layout.driver.value,
            config=_configured(node.config_files, root, captured=options.config is None, window=node.window),
            captured_at=recorded_node.about.at if recorded_node.about is not None else None,
        )
        return describe(about, result)


def _machine(options: Namespace) -> dict[str, Any]:
    if options.root != "/":
        raise CliError("--machine and --root exclude each other", Exit.USAGE)
    loaded = load.load(places.config_path(options), required=options.config is not None)
    loaded = load.in_force(loaded, time.time())
    config = loaded.config
    topology = parse(options.machine)
    pods, problems = read_pods_file(options.pods, marks_of(config)) if options.pods is not None else ([], [])
    about = PlanSubject(
        name="a described machine",
        mode=config.mode.value,
        cgroups=HierarchyMode.V1.value,
        driver=LAYOUT.driver.value,
        config=_configured(loaded.files, "/", captured=False, window=loaded.window),
        described=True,
    )
    return describe(about, plan_machine(topology, pods, config, problems))


def _configured(files: Sequence[str], root: str, *, captured: bool, window: str | None) -> str:
    if captured and root != "/":
        files = [f"/{os.path.relpath(path, root)}" for path in files]
    text = ", ".join(files) or "defaults (no file)"
    return text if window is None else f"{text} (window {window})"


def ask_live(node: InspectedNode) -> RecordedNode:
    """The same responses from a running node: what the agent would do here, before it is installed."""
    # CPU use is the difference of two readings.
    first = reading(node)
    results = query_node(node)
    time.sleep(_INTERVAL_S)
    readings = [usage_reading for usage_reading in (first, reading(node)) if usage_reading is not None]
    return RecordedNode(
        kubelet=results.kubelet_pods if results.kubelet_body is not None else None,
        cri=None if results.cri_version is None else CriAnswers(version=results.cri_version, pods=results.cri_pods),
        usage=tuple(readings),
        problems=tuple(text for text in (results.kubelet_problem, results.cri_problem) if text),
    )


def describe(about: PlanSubject, result: PlanResult) -> dict[str, Any]:
    """The plan as the documented, stable document: plain values, keys are added but never renamed."""
    pools, view = result.desired.plan.pools, result.view
    lists, claims = pool_lists(pools), cpu_claims(view, pools)
    containers = {container.id: container.name for pod in view.pods.values() for container in pod.containers}
    return {
        "schema": SCHEMA,
        "kind": "bypassd-plan",
        "version": __version__,
        "at": time.time(),
        "captured_at": about.captured_at,
        "node": {
            "name": about.name,
            "described": about.described,
            "machine": machine_text(view.topology),
            "mode": about.mode,
            "config": about.config,
            "cgroups": about.cgroups,
            "driver": about.driver,
            "kubepods": view.kubepods,
            "cpus": str(view.topology.online),
            "kubelet_policy": view.kubelet.policy.value,
        },
        "sources": dict(result.sources),
        "pools": lists,
        "claims": plain(claims),
        "placement": placement(view.topology, as_sets(lists)),
        "budget": budget_facts(result.desired.plan, view.cpu),
        "resources": resource_facts(result.desired.plan, result.cache),
        "pods": [pod_facts(pod, pools) for _, pod in sorted(view.pods.items())],
        "settings": [_setting(setting, containers) for setting in result.settings],
        "refusals": [
            {
                "path": refusal.setting.path,
                "knob": refusal.setting.knob,
                "value": _plain(refusal.setting.value),
                "pod_uid": refusal.setting.pod_uid,
                "rule": refusal.rule,
                "reason": refusal.reason,
            }
            for refusal in result.desired.refusals
        ],
        "writes": [{name: getattr(step, name) for name in _WRITE} for step in result.writes.steps],
        "problems": [*result.problems, *(claim.message for claim in claims if claim.cut)],
    }


def _name(node: InspectedNode, recorded_node: RecordedNode) -> str:
    if recorded_node.about is not None:
        return recorded_node.about.node
    return node.kubelet.node_name or ("a copied node" if node.copied else os.uname().nodename)


def _setting(item: OfflineSetting, containers: Mapping[str, str | None]) -> dict[str, Any]:
    setting = item.setting
    return {
        **{name: getattr(setting, name) for name in ("path", "knob", "policy", "reason", "pod_uid", "container_id")},
        **{name: getattr(item, name) for name in ("control_file", "wanted", "actual", "state", "detail")},
        "value": _plain(setting.value),
        "container": containers.get(setting.container_id or ""),
    }


def _plain(value: object) -> object:
    return value if value is None or isinstance(value, int) else str(value)


@contextmanager
def _unpacked(root: str) -> Iterator[tuple[str, FileOps]]:
    """The tree itself, and how its control files are read; an archive is unpacked for as long as it is needed."""
    if not os.path.exists(root):
        raise CliError(f"{root}: no such directory or archive", Exit.USAGE)
    if os.path.isdir(root):
        yield os.path.abspath(root), REAL
        return
    with Termination(), tempfile.TemporaryDirectory(prefix="bypassd-plan-") as directory:
        try:
            controls = unpack(root, directory)
        except InputError as exc:
            raise CliError(f"cannot be unpacked: {exc}", Exit.USAGE) from exc
        yield directory, controls
