"""``bypassctl init``: a configuration of about ten lines with what this node has, each line explained; credentials.

Nothing is installed, started or overwritten. A value that is the default is written too where a person decides on it
first; what a node does not have is left out, with the reason in a comment.
"""

import contextlib
import json
import os
import platform
import time
from argparse import Namespace
from collections.abc import Iterator
from textwrap import TextWrapper
from typing import Final, NamedTuple

from cgroupfs.bounded import decoded, read_file
from cgroupfs.errors import AgentError, InputError, errno_name
from cgroupfs.lines import lines_of
from reconciler.actuators.network.netlink import link_mbit
from reconciler.cli.checks.offers import offers_of
from reconciler.cli.exits import CliError, Exit
from reconciler.cli.nodeview import InspectedNode, inspect_node, read_text
from reconciler.cli.options import OWN_KUBECONFIG
from reconciler.config.environment import node_name
from reconciler.config.presets import effects
from reconciler.runtime import format as fmt
from reconciler.runtime import streams
from reconciler.runtime.kubelet_programs import SOCKETS
from state.printable import printable
from state.topology_sysfs import read_topology

_WIDTH: Final = 96
_LONGEST: Final = 160
"""Characters of a text of the node within a comment."""
_MANY_PODS: Final = 250
_ROUTES: Final = 64 * 1024
_LARGEST_SOURCE: Final = 1 << 20
_DEEPEST: Final = 24


class _ConfigEntry(NamedTuple):
    """``lines`` of the configuration; none: only the comment. ``why``: what was found, and what the line does."""

    lines: tuple[str, ...]
    why: str


def run(options: Namespace) -> int:
    """Make the subject that the command line names: a configuration, or credentials."""
    if options.subject == "config":
        return _configuration(options)
    from reconciler.cli import credentials  # the loop and the HTTP client

    options.to = options.to or OWN_KUBECONFIG
    return credentials.run(options)


def _configuration(options: Namespace) -> int:
    """Print the configuration, or write it to a new file (``--to``). ``--from``: of a control plane's settings."""
    text = initial(inspect_node(options)) if options.source is None else _imported(options.source)
    if options.to is None:
        streams.write(text)
        return Exit.OK
    try:
        directory = os.path.dirname(os.path.abspath(options.to))
        if os.path.basename(directory) == "conf.d":  # a package does not have it
            with contextlib.suppress(FileExistsError):
                os.mkdir(directory, 0o755)
        # O_EXCL: a file, or a link, that exists is never written to.
        with open(os.open(options.to, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(text.encode())
    except FileExistsError as exc:
        raise CliError(f"{options.to} exists and is not overwritten; give another file", Exit.REFUSED) from exc
    except OSError as exc:
        raise CliError(f"{options.to}: cannot be written: {errno_name(exc.errno)}", Exit.REFUSED) from exc
    streams.write(f"{options.to}: written, mode 600. Check it: bypassd check-config --config {options.to}\n")
    return Exit.OK


def _imported(path: str) -> str:
    """The configuration from a control plane's settings, and what of them has no counterpart. Errors: `CliError`."""
    from reconciler.config import imported  # as the reader below, only for this form
    from reconciler.settings.yaml import read_yaml

    try:
        text = read_file(path, _LARGEST_SOURCE, pipes=True).decode()
        try:
            document = decoded(json.loads, text, deepest=_DEEPEST)
        except ValueError:
            document = read_yaml(text, path).data
        found = imported.fitting(imported.imported(document))
    except (OSError, UnicodeError) as exc:
        why = errno_name(exc.errno) if isinstance(exc, OSError) else "not UTF-8 text"
        raise CliError(f"{path}: cannot be read: {why}", Exit.REFUSED) from exc
    except InputError as exc:
        raise CliError(str(exc) if path in str(exc) else f"{path}: {exc}", Exit.USAGE) from exc
    day = time.strftime("%Y-%m-%d")
    rows = _comment(f"From {found.source} ({_shown(path)}), by bypassctl init on {day}.")
    rows += _comment("Begin with observe; then cpu, cpu+memory, full: bypassctl protect LEVEL. A setting below wins.")
    rows += ["protect: observe", "", *imported.lines(found.settings)]
    if found.left:
        rows += ["", *_comment(f"Without a counterpart here, or not taken ({len(found.left)}):")]
        rows += [row for item in found.left for row in _comment(f"- {item}")]
    return "\n".join(rows) + "\n"


def initial(node: InspectedNode) -> str:
    """The text of the file. It is valid whatever the node's files say: their texts are quoted, and bounded."""
    versions = {} if node.hierarchy is None else node.hierarchy.versions()
    groups = "no cgroups found" if not versions else f"cgroup v{min(versions.values())}"
    name, day = _shown(node_name(node.kubelet)), time.strftime("%Y-%m-%d")
    counts = f"{fmt.plural(_cpus(node), 'CPU')}, {fmt.plural(len(node.pods), 'pod')}"
    found = f"Linux {_shown(platform.release())}, {groups}, {counts}"
    lines = _comment(f"bypassd on {name}; made by bypassctl init on {day}, which found {found}.")
    lines += _comment("Every setting: bypassctl config explain. Check the node: bypassctl doctor.")
    for entry in _entries(node):
        lines += ["", *_comment(entry.why), *entry.lines]
    return "\n".join(lines) + "\n"


def _entries(node: InspectedNode) -> Iterator[_ConfigEntry]:
    levels = list(effects(offers_of(node)))
    complete = [effect.level.value for effect in levels if not effect.lacks]
    lacking = [f"{effect.level.value} lacks {', '.join(effect.lacks)}" for effect in levels if effect.lacks]
    yield _ConfigEntry(
        ("protect: observe",),
        "Writes nothing; bypassctl diff shows what a level would write. Then cpu, cpu+memory, full, one after another. "
        f"On this node {'complete: ' + ', '.join(complete) if complete else 'no level is complete'}"
        f"{'; ' + '; '.join(lacking) if lacking else ''}.",
    )
    yield _ConfigEntry(
        ("kubelet: {endpoint: auto}",),
        f"The kubelet: CPU manager policy {_shown(node.kubelet.cpu_manager_policy)}, "
        f"{node.kubelet.cgroup_driver} driver, directory {_shown(node.kubelet.root_dir)}. "
        "auto reads its pods with credentials (bypassctl init credentials)."
        if node.kubelet.pid is not None
        else "No running kubelet was found: its usual places apply, and auto uses it as soon as it runs.",
    )
    sockets = [path for path in SOCKETS if os.path.exists(os.path.join(node.root, path.lstrip("/")))]
    if sockets:
        why = "The container runtime's socket, from which labels of pods are read."
        yield _ConfigEntry((f"runtime: {{sockets: [{json.dumps(sockets[0])}]}}",), why)
    else:
        yield _ConfigEntry(
            (), "No container runtime's socket was found at the usual places; set runtime.sockets if it is elsewhere."
        )
    yield from _policies(node)
    yield _ConfigEntry(
        ("eviction: {dry_run: true}",),
        "Evictions are shown and not made (bypassctl evictions), until this is false and eviction.enabled is true.",
    )
    many = len(node.pods) > _MANY_PODS
    series = "sums by class" if many else "about 10 series each"
    yield _ConfigEntry(
        (f"http: {{address: 127.0.0.1, port: 9470, pod_metrics: {'false' if many else 'true'}}}",),
        f"Metrics for this machine only; for pods ({len(node.pods)} now) {series}.",
    )
    yield _ConfigEntry(
        ("on_stop: keep",), "A stopped daemon leaves its settings in force; bypassctl restore takes them back."
    )
    yield _ConfigEntry(
        ("log: {level: info}",), "The journal also has every alert; other receivers: alerts.sinks (docs/alerts.md)."
    )


def _policies(node: InspectedNode) -> Iterator[_ConfigEntry]:
    """One block of what the policies need to have of this node; only comments where it is nothing."""
    kubelets, many_cpus, link = node.kubelet.reserved_cpus, _cpus(node) >= 4, _interface(node.root)
    block: list[str] = []
    if kubelets:
        yield _ConfigEntry(
            (), f"The kubelet reserves CPU {kubelets} for the system, and so does bypassd without a setting."
        )
    elif not many_cpus:
        yield _ConfigEntry((), "The kubelet reserves no CPU, and with fewer than 4 bypassd should not either.")
    else:
        why = "The kubelet reserves no CPU: BE and dedicated pods stay off this one, which is the system's."
        block += [*_comment(why, "  "), '  reserve: {cpus: "0"}']
    if link is None:
        yield _ConfigEntry((), "Network shares are off: the driver of the default route's interface reports no speed.")
    else:
        why = f"The default route's interface, {link[1]} Mbit/s: at level full BE work has a bounded share of it."
        block += [*_comment(why, "  "), f"  network: {{interfaces: [{{name: {json.dumps(link[0])}}}]}}"]
    if block:
        yield _ConfigEntry(("policies:", *block), "What the policies need to have of this node.")


def _cpus(node: InspectedNode) -> int:
    try:
        return len(read_topology(node.root).online)
    except AgentError:
        return 0


def _interface(root: str) -> tuple[str, int] | None:
    """The default route's interface, if its driver reports a speed. Source: proc(5), /proc/net/route."""
    for row in lines_of((read_text(root, "proc/net/route") or "")[:_ROUTES])[1:]:
        fields = row.split()
        # The default route's destination; the interface becomes a part of a path.
        if len(fields) > 1 and fields[1] == "00000000" and "/" not in fields[0]:
            speed = link_mbit(fields[0], os.path.join(root, "sys/class/net"))
            return None if speed is None else (fields[0], speed)
    return None


def _shown(text: str) -> str:
    return printable(text, _LONGEST)


def _comment(text: str, indent: str = "") -> list[str]:
    """In lines of the file's width, each with its sign."""
    wrapper = TextWrapper(_WIDTH, break_long_words=False, break_on_hyphens=False)
    wrapper.initial_indent = wrapper.subsequent_indent = f"{indent}# "
    return wrapper.wrap(" ".join(text.split()))
