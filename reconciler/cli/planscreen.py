"""The plan document on a screen: what it is for, the drawing of the CPUs, the pools, what is wanted and written."""

import shutil
from collections import Counter
from collections.abc import Iterator
from typing import Any

from reconciler.cli.blocks import Block, Cell, StyledText, Table
from reconciler.cli.drawing import draw, marks
from reconciler.cli.format import exact_text, file_text, group_title, setting_text, value_text
from reconciler.cli.screen import blank, field, head, line
from reconciler.cli.status import CLASSES
from reconciler.runtime import format as fmt
from state.cache import RESCTRL_GROUP
from state.cpu import CORE_COOKIE, THREAD_POLICY
from state.memory import OOM_SCORE


def blocks(fields: dict[str, Any]) -> Iterator[Block]:
    """The document, for people."""
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
    yield from draw(fields["placement"], fields["pools"], shutil.get_terminal_size().columns)
    letters, names = marks(fields["pools"]), {pod["uid"]: pod["title"] for pod in fields["pods"]}
    yield Table(
        ("", "POOL", "CPUS"),
        [(letters[name], _pool(name, names), value_text(fields["pools"][name])) for name in letters],
        names=1,
    )
    if claims := [claim for claim in fields["claims"] if claim["asked"]]:
        yield blank()
        yield head("claims on CPUs")
        rows = [_claim(claim, names) for claim in claims]
        yield Table(("CLAIM", "ASKED", "GOT", "NUMA", "RULE"), rows, names=0)
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
    if fields["settings"]:
        yield blank()
        yield head("settings")
        settings: list[tuple[Cell, ...]] = [
            (
                setting["knob"],
                exact_text(setting["knob"], setting["wanted"], setting["control_file"]),
                exact_text(setting["knob"], setting["actual"], setting["control_file"]),
                StyledText(setting["state"], "ok" if setting["state"] == "in place" else "warn"),
                _where(setting, titles),
            )
            for setting in fields["settings"]
        ]
        yield Table(("KNOB", "WANTED", "ACTUAL", "STATE", "GROUP"), settings, names=4)
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
    if active:
        yield blank()
        yield head("memory, disk, network, cache, threads")
        yield Table(("POLICY", "PLAN"), active)
    rows = [*_targets(fields, titles, names)]
    if rows:
        yield blank()
        yield head("wanted beside the control files")
        yield Table(("KNOB", "WANTED", "WHERE"), rows, names=2)
    cache = fields["cache"] or {}
    if cache.get("groups"):
        yield blank()
        yield head("resctrl groups")
        groups = [(name, "; ".join(item["schemata"]), item["reason"]) for name, item in cache["groups"].items()]
        yield Table(("GROUP", "SCHEMATA", "FOR"), groups)
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


def _pool(name: str, titles: dict[str, str]) -> str:
    """The pool of a container's or a pod's own by the name of the pod, where that is known."""
    kind, _, owner = name.partition("/")
    uid, _, container = owner.partition("/")
    if kind == "isolation":
        return f"{kind} {titles.get(uid, uid)}"
    return f"{kind} {titles.get(uid, uid)}/{container}" if kind == "dedicated" else name


def _where(fields: dict[str, Any], titles: dict[str, str]) -> str:
    place = group_title(fields["path"], titles)
    return f"{place}: {fields['detail']}" if fields["detail"] else place
