"""Shows the placement of CPUs: a letter for each CPU, by pool, at its place in the topology.

A block for each NUMA node; in it a column for each core, its threads one below the other, cores of one L3 cache side by
side. The letters suffice without colours. `placement` makes the document's part, `draw` the lines from it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from cgroupfs.cpuset import EMPTY, CpuSet
from reconciler.cli.screen import Block, Line, StyledText, blank, line
from reconciler.runtime import format as fmt

if TYPE_CHECKING:
    from state.topology import Topology

RECLAIMED: Final = "reclaimed"
_LETTERS: Final = {"reserved": "R", "interrupt": "I", "shared": "S", "dedicated": "D", RECLAIMED: "B"}
_STYLES: Final = {"reserved": "pool reserved", "interrupt": "pool interrupt", "shared": "pool shared"}
_DIGITS: Final = "123456789"
_NAMES: Final = "ACEFGHJKLMNOPQTUVWXYZ"
"""For named pools: without the letters of `_LETTERS`. More pools than letters share the last one."""
_SEVERAL: Final = "*"
_NO_POOL: Final = "."
_PERFORMANCE: Final = "P"
_EFFICIENCY: Final = "E"
"""`state.topology.CpuKind`, which is not imported here for the start-up's sake."""
_GROUP: Final = 8
"""Cores without a gap between them: as many as the eye counts."""


def placement(topology: "Topology", pools: Mapping[str, CpuSet]) -> dict[str, Any]:
    """Sockets -> nodes -> cores -> cpus, each CPU with the names of its pools; the document's part ``placement``."""
    owners: dict[int, list[str]] = {}
    for name in sorted(pools):
        for cpu in pools[name]:
            owners.setdefault(cpu, []).append(name)
    sockets: dict[int, dict[int, dict[int, list[int]]]] = {}
    for item in sorted(topology.cpus, key=lambda cpu: (cpu.thread, cpu.id)):
        sockets.setdefault(item.socket, {}).setdefault(item.node, {}).setdefault(item.core, []).append(item.id)

    def core(number: int, cpus: Sequence[int]) -> dict[str, Any]:
        first = topology.cpu(cpus[0])
        return {
            "id": number,
            "l3": first.l3,
            "kind": first.kind.value,
            "cpus": [{"id": cpu, "pools": owners.get(cpu, [])} for cpu in cpus],
        }

    def node(number: int, cores: Mapping[int, list[int]]) -> dict[str, Any]:
        known = topology.node(number)
        return {
            "id": number,
            "memory_bytes": known.memory_bytes,
            "distances": list(known.distances),
            "cores": [core(instance, cpus) for instance, cpus in sorted(cores.items())],
        }

    return {
        "sockets": [
            {"id": socket, "nodes": [node(number, cores) for number, cores in sorted(nodes.items())]}
            for socket, nodes in sorted(sockets.items())
        ],
        "memory_nodes": [
            {"id": node.id, "memory_bytes": node.memory_bytes, "distances": list(node.distances)}
            for node in topology.numa
            if not topology.node_cpus(node.id)
        ],
        "offline": str(topology.offline),
        "isolated": str(topology.isolated),
    }


def marks(pools: Mapping[str, str]) -> dict[str, StyledText]:
    """The letter of each pool, in the order in which people read them."""
    texts = {
        name: StyledText(_LETTERS[name], _STYLES[name]) for name in ("reserved", "interrupt", "shared") if name in pools
    }
    special = {"reserved", "interrupt", "shared", RECLAIMED}
    named = sorted(name for name in pools if name not in special and not name.startswith("dedicated/"))
    texts |= {
        name: StyledText(letter, "pool named")
        for name, letter in zip(named, _NAMES.ljust(len(named), _NAMES[-1]), strict=False)
    }
    owners = sorted(name for name in pools if name.startswith("dedicated/"))
    letters = _DIGITS if len(owners) <= len(_DIGITS) else _LETTERS["dedicated"] * len(owners)
    texts |= {name: StyledText(letter, "pool dedicated") for name, letter in zip(owners, letters, strict=False)}
    if RECLAIMED in pools:
        texts[RECLAIMED] = StyledText(_LETTERS[RECLAIMED], "pool reclaimed")
    return texts


class _Cell(NamedTuple):
    cpu: int
    mark: StyledText


_Core = list[_Cell]


def draw(placed: Mapping[str, Any], pools: Mapping[str, str], width: int) -> Iterator[Block]:
    """The drawing in at most ``width`` columns (never less than one group of cores takes), and what its signs mean."""
    letters = marks(pools)
    seen: set[str] = set()
    nodes = [(socket, node) for socket in placed["sockets"] for node in socket["nodes"]]
    digits = len(str(max(cpu["id"] for _, node in nodes for core in node["cores"] for cpu in core["cpus"])))
    for socket, node in nodes:
        cpus = CpuSet(cpu["id"] for core in node["cores"] for cpu in core["cpus"])
        memory = f"  {fmt.size(node['memory_bytes'])}" if node["memory_bytes"] is not None else ""
        yield line(
            StyledText(f"socket {socket['id']}  node {node['id']}", "head"),
            StyledText(f"  CPU {_short(cpus)}{memory}", "dim"),
        )
        marked = {cpu["id"]: _sign(cpu["pools"], letters) for core in node["cores"] for cpu in core["cpus"]}
        seen.update(mark.text for mark in marked.values())
        yield from node_rows(node, marked.__getitem__, digits, width)
    for node in placed["memory_nodes"]:
        memory = f"  {fmt.size(node['memory_bytes'])}" if node["memory_bytes"] is not None else ""
        yield line(StyledText(f"node {node['id']}", "head"), StyledText(f"  memory only{memory}", "dim"))
    yield from _notes(placed, seen)


def node_rows(node: Mapping[str, Any], mark: Callable[[int], StyledText], digits: int, width: int) -> Iterator[Line]:
    """One node's CPUs with the ``mark`` of each: caches beside each other, threads below each other.

    ``digits``: of the largest number of a CPU. ``width``: as of `draw`.
    """
    for kind in (_PERFORMANCE, _EFFICIENCY):
        cores = [core for core in node["cores"] if core["kind"] == kind]
        domains: dict[int, list[_Core]] = {}
        for core in cores:
            row = [_Cell(cpu["id"], mark(cpu["id"])) for cpu in core["cpus"]]
            domains.setdefault(core["l3"], []).append(row)
        if cores and kind == _EFFICIENCY:
            yield line(StyledText("efficiency cores", "dim"), indent=2)
        yield from _rows(list(domains.values()), digits, width)


def _sign(pools: Sequence[str], letters: Mapping[str, StyledText]) -> StyledText:
    """The letter of the CPU's one online pool; small where BE work runs there too."""
    online = [name for name in pools if name != RECLAIMED]
    if not online:
        return letters[RECLAIMED] if pools else StyledText(_NO_POOL, "dim")
    if len(online) > 1:
        return StyledText(_SEVERAL, "pool several")
    mark = letters[online[0]]
    if len(pools) == 1:
        return mark
    letter = mark.text if mark.text.isalpha() else _LETTERS["dedicated"]
    return StyledText(letter.lower(), f"{mark.style} be")


def _rows(domains: Sequence[Sequence[_Core]], digits: int, width: int) -> Iterator[Line]:
    """Cores in columns, a gap after each eight of them, a bar between L3 caches; as many beside each other as fit."""
    room = max(width - 2 - digits - 1, _GROUP)
    row: list[_Core | str] = []
    used = 0
    for number, domain in enumerate(domains):
        for start in range(0, len(domain), _GROUP):
            group = domain[start : start + _GROUP]
            gap = " " if start else "|" if number else ""
            if row and used + len(gap) + len(group) > room:
                yield from _threads(row, digits)
                row, used, gap = [], 0, ""
            row += [gap, *group] if gap else group
            used += len(gap) + len(group)
    if row:
        yield from _threads(row, digits)


def _threads(row: Sequence[_Core | str], digits: int) -> Iterator[Line]:
    """One line for each thread, led by the number of its first CPU."""
    cores = [item for item in row if not isinstance(item, str)]
    for thread in range(max(map(len, cores))):
        first = next(core[thread].cpu for core in cores if len(core) > thread)
        cells = [
            StyledText(item, "dim")
            if isinstance(item, str)
            else item[thread].mark
            if len(item) > thread
            else StyledText(" ", "dim")
            for item in row
        ]
        yield line(StyledText(f"{first:>{digits}} ", "dim"), *cells, indent=2)


def _notes(placed: Mapping[str, Any], seen: set[str]) -> Iterator[Block]:
    notes = []
    if any(sign.islower() for sign in seen):
        notes.append("lower case: BE work runs there too")
    if _SEVERAL in seen:
        notes.append(f"{_SEVERAL} in several pools")
    if _NO_POOL in seen:
        notes.append(f"{_NO_POOL} in no pool")
    notes += [f"{name}: CPU {placed[name]}" for name in ("offline", "isolated") if placed[name]]
    if notes:
        yield line(StyledText("; ".join(notes), "dim"))
    yield blank()


def _short(cpus: CpuSet) -> str:
    """The list, or where it would be long, its ends and how many there are."""
    text = str(cpus)
    return text if len(text) <= 40 else f"{min(cpus)}-{max(cpus)}, {len(cpus)} CPUs"


def as_sets(pools: Mapping[str, str]) -> dict[str, CpuSet]:
    return {name: CpuSet.parse(text) if text else EMPTY for name, text in pools.items()}
