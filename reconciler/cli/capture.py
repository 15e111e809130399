"""``bypassctl capture``: all that the agent reads on this node, as a tree that works as a root; secrets masked."""

import json
import os
import sqlite3
import tempfile
import time
from argparse import Namespace
from contextlib import closing, suppress
from typing import Final

import msgspec

from cgroupfs.errors import AgentError
from cgroupfs.usage import UsageReader
from reconciler import __version__
from reconciler.cli import masks, places, recorded
from reconciler.cli.asking import QueryResults, query_node
from reconciler.cli.blocks import StyledText
from reconciler.cli.document import fetch
from reconciler.cli.exits import CliError, Exit
from reconciler.cli.gather import ArchiveWriter, CaptureCollector, open_sink
from reconciler.cli.nodeview import InspectedNode, inspect_node, read_text
from reconciler.cli.recorded import CaptureInfo, CriAnswers, UsageReading
from reconciler.cli.screen import line, present
from reconciler.config.window_time import local_name
from reconciler.runtime import format as fmt
from state.reader import NoStoreError, open_readonly

_LONGEST_S: Final = 60.0


def run(options: Namespace) -> int:
    """Take the capture. Unreadable files are reported, and are no failure."""
    if not 0 <= options.interval <= _LONGEST_S:
        raise CliError(f"--interval {options.interval:g}: expected 0 to {_LONGEST_S:g} seconds", Exit.USAGE)
    node = inspect_node(options)
    name = node.kubelet.node_name or os.uname().nodename
    target = options.target or time.strftime(f"bypassd-capture-{name}-%Y%m%d-%H%M%S.tar.gz")
    with open_sink(target) as sink:
        about = take(node, sink, options, name)
    size = f", {fmt.size(os.path.getsize(target))}" if os.path.isfile(target) else ""
    lines = [line(f"{target}: {fmt.plural(about.files, 'file')}{size}; ", StyledText("secrets are masked", "ok"))]
    lines += [line(f"kubelet: {about.kubelet}"), line(f"runtime: {about.cri}")]
    lines += [line(StyledText("! ", "warn"), problem) for problem in about.problems]
    where = target if os.path.isfile(target) else f"{target.rstrip('/')}/"
    lines.append(line(f"What the agent would do there: bypassctl plan --root {where}"))
    present(options.output, {"target": target, **msgspec.to_builtins(about)}, lines)
    return Exit.OK


def take(node: InspectedNode, sink: ArchiveWriter, options: Namespace, name: str) -> CaptureInfo:
    """Everything into ``sink``; what became of it."""
    first = reading(node)
    began = time.monotonic()
    results = query_node(node)
    gatherer = CaptureCollector(node, sink)
    problems = list(node.problems.values())
    _answers(node, sink, results)
    problems += _state(node, sink, options)
    if first is not None and options.interval:
        # Two readings make a signal; the second is of the moment that the rest of the capture shows.
        time.sleep(max(0.0, options.interval - (time.monotonic() - began)))
        second = reading(node)
        readings = [first, second] if second is not None else [first]
        sink.put(recorded.USAGE, msgspec.json.encode(readings))
    gatherer.everything()
    config = "/" + os.path.relpath(places.config_path(options), node.root)
    about = CaptureInfo(
        version=__version__,
        node=name,
        at=time.time(),
        files=sink.files + 1,
        kubelet_version=results.kubelet_version,
        kubelet=_summary(
            "kubelet", results.kubelet_body is not None, len(results.kubelet_pods), results.kubelet_problem, node
        ),
        cri=_summary("CRI", results.cri_version is not None, len(results.cri_pods), results.cri_problem, node),
        problems=(*problems, *gatherer.problems),
        config=config if not config.startswith("/..") else None,
        zone=local_name(node.root) or "UTC",
    )
    sink.put(recorded.ABOUT, msgspec.json.encode(about))
    return about


def reading(node: InspectedNode) -> UsageReading | None:
    """CPU use of the machine and of every pod, as counters of this moment."""
    stat = read_text(node.root, "proc/stat")
    if stat is None or node.hierarchy is None:
        return None
    usage = UsageReader(node.hierarchy)
    used = {uid: ns for uid, pod in node.pods.items() if (ns := usage.cpu_ns(pod.group.path)) is not None}
    return UsageReading(at=time.monotonic(), stat=stat, pods=used)


def _answers(node: InspectedNode, sink: ArchiveWriter, results: QueryResults) -> None:
    if node.copied:
        # The responses that the copy contains.
        for path, masked in ((recorded.KUBELET_PODS, masks.mask_pods_text), (recorded.CRI, masks.mask_json_text)):
            text = read_text(node.root, path)
            if text is not None:
                with suppress(ValueError):  # no JSON: no response
                    sink.put(path, masked(text).encode())
        return
    if results.kubelet_body is not None:
        with suppress(ValueError):
            sink.put(
                recorded.KUBELET_PODS, masks.mask_pods_text(results.kubelet_body.decode(errors="replace")).encode()
            )
    if results.cri_version is not None:
        answers = CriAnswers(version=results.cri_version, conditions=results.cri_conditions, pods=results.cri_pods)
        sink.put(recorded.CRI, json.dumps(masks.mask_json(msgspec.to_builtins(answers))).encode())


def _state(node: InspectedNode, sink: ArchiveWriter, options: Namespace) -> list[str]:
    """The daemon's document, and a copy of the store: pools and holds decide about the plan."""
    if not node.copied:
        try:
            document = fetch(options, say=False)
            sink.put(recorded.STATE, json.dumps(masks.mask_json(document.body)).encode())
        except AgentError:
            pass  # neither a daemon nor a store: nothing was ever decided here
    try:
        sink.put(os.path.relpath(node.config.store.path, "/"), _store_copy(node.store))
    except NoStoreError:
        return []
    except (AgentError, sqlite3.Error) as exc:
        return [str(exc)]
    return []


def _store_copy(path: str) -> bytes:
    """One whole file, also while a daemon writes."""
    with tempfile.TemporaryDirectory() as directory:
        copy = os.path.join(directory, "state.db")
        with closing(open_readonly(path)) as source, closing(sqlite3.connect(copy)) as target:
            source.backup(target)
            target.execute("PRAGMA journal_mode=DELETE")
        with open(copy, "rb") as file:
            return file.read()


def _summary(name: str, answered: bool, pods: int, problem: str, node: InspectedNode) -> str:
    if answered:
        return fmt.plural(pods, "pod") + (f"; {problem}" if problem else "")
    return problem or ("not read: copied node" if node.copied else f"{name} not reachable")
