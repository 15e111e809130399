"""``bypassctl doctor``: what this node offers and lacks, on one screen, each lack with its fix."""

import os
from argparse import Namespace
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Final

from reconciler.cli.asking import query_node
from reconciler.cli.checks import CheckResult, CheckState, agent, kubelet, machine, offers, watching
from reconciler.cli.exits import Exit
from reconciler.cli.nodeview import InspectedNode, inspect_node
from reconciler.cli.screen import Block, Cell, StyledText, Table, line, present
from reconciler.runtime import format as fmt

_OF_ROOT: Final = frozenset(
    {
        *("checkpoints", "CPU manager", "CRI", "eviction", "fanotify", "kubelet /pods", "pressure events"),
        *("recording", "run queue", "runtime", "store"),
    }
)
"""Checks that read files or sockets of root, or try what only root may."""


def run(options: Namespace) -> int:
    """Read the node and query its programs. `Exit.NOT_OK` when a finding is bad; a warning is not a failure."""
    node = inspect_node(options)
    if options.prove:
        return _proven(node, options.output)
    findings = examine(node)
    rows = [
        {"check": result.name, "state": result.state.value, "found": result.found, "fix": result.fix}
        for result in findings
    ]
    document = {"root": node.root, "bad": _count(findings, CheckState.BAD), "findings": rows}
    present(options.output, document, _blocks(findings))
    return Exit.NOT_OK if _count(findings, CheckState.BAD) else Exit.OK


def _proven(node: InspectedNode, output: str) -> int:
    """The trials. `Exit.NOT_OK` when the kernel does not do what was requested."""
    from reconciler.cli import prove

    proofs = prove.prove(node)
    styles = {"holds": "ok", "fails": "bad", "unknown": "warn"}
    cells: list[tuple[Cell, ...]] = []
    for proof in proofs:
        taken = f"({fmt.clock(proof.at)}, {fmt.duration(proof.took_s)})"
        cells.append((StyledText(proof.state, styles[proof.state]), proof.name, f"{proof.found} {taken}"))
    document = {"proofs": [proof._asdict() for proof in proofs]}
    present(output, document, [Table(("", "TRIAL", "FOUND"), cells)])
    return Exit.NOT_OK if any(proof.state is prove.ProofState.FAILS for proof in proofs) else Exit.OK


def examine(node: InspectedNode) -> list[CheckResult]:
    """Every finding, in the order of the screen."""
    results = query_node(node)
    findings = [
        *machine.machine(node),
        *kubelet.kubelet(node, results),
        *kubelet.runtime(node, results),
        *watching.watching(node, results),
        *agent.agent(node, results),
        *offers.protection(node),
    ]
    return findings if node.copied or os.geteuid() == 0 else list(map(_without_rights, findings))


def _without_rights(result: CheckResult) -> CheckResult:
    """What needs root is unknown to another user: the fault that was found is of this user and not of the node."""
    if result.state is CheckState.OK or result.name not in _OF_ROOT:
        return result
    return CheckResult(result.name, CheckState.WARN, "unknown without root: permission denied", "run with sudo")


def _count(findings: Iterable[CheckResult], state: CheckState) -> int:
    return Counter(result.state for result in findings)[state]


def _blocks(findings: list[CheckResult]) -> Iterator[Block]:
    rows: list[tuple[Cell, ...]] = []
    for result in findings:
        rows.append((StyledText(f"{result.state.value:<4}", result.state.value), result.name, result.found))
        if result.fix:
            rows.append(("", "", f"fix: {result.fix}"))
    yield Table(("", "CHECK", "FOUND"), rows)
    bad, warned = _count(findings, CheckState.BAD), _count(findings, CheckState.WARN)
    if not bad and not warned:
        yield line(StyledText("OK: 0 errors, 0 warnings", "ok"))
    elif not bad:
        yield line(f"{fmt.plural(warned, 'warning')} (optional features unavailable), 0 errors")
    else:
        yield line(StyledText(fmt.plural(bad, "error"), "bad"), f", {fmt.plural(warned, 'warning')}")
