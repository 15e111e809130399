"""What ``bypassctl top`` shows, as lines of cells: the node, its verdicts, the CPU map, the pods.

Pure: from the daemon's answers and the person's choices to a frame. No line is longer than the width; texts of others
are ASCII by then, so that each character takes one column.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from cgroupfs.cpuset import CpuSet
from reconciler.cli.document import Row
from reconciler.cli.drawing import RECLAIMED, marks, node_rows, placement
from reconciler.cli.format import window_text
from reconciler.cli.pods import ABOVE, AMOUNTS, parent_texts, pod_cells, sort_rows
from reconciler.cli.screen import Cell, StyledText, shortened, style_of, text_of
from reconciler.cli.watched import SHOWN, STYLES, node_cells, of_node
from reconciler.runtime import format as fmt
from state.printable import printable

SORTS: Final = ("use", "throttled", "wait", "quota", "pod", "class", "state")
CLASSES: Final = ("", "dedicated", "shared", RECLAIMED, "system")
MAPS: Final = ("load", "pools", "off")
HELP: Final = (
    ("q, Ctrl-C", "quit"),
    ("/", "filter: a part of name, pool, state or uid"),
    ("Enter, Esc", "keep the filter; remove it"),
    ("s", "order: the next column"),
    ("c", "class: the next one, or all"),
    ("m", "map: load, pools, off"),
    ("p, space", "pause, and continue"),
    ("+ -", "interval: longer, shorter"),
    ("up, down, PgUp, PgDn, Home, End", "move in the list"),
    ("?, h", "this help; any key closes it"),
)
_COLUMNS: Final = (
    ("STATE", 9),
    ("CLASS", 9),
    ("POOL", 12),
    ("CPUS", 14),
    *((name, 7 if name == "THROT" else 6) for name in AMOUNTS),
)
_DROPPED_FIRST: Final = ("POOL", "CPUS", "QUOTA", "CLASS")
_HEAD_OF: Final = {"throttled": "THROT"}
"""The headings of `SORTS` where they differ."""
_NAME: Final = 34
"""Columns for a pod's name before a column is left out."""
_GAP: Final = 2
"""Between two NUMA nodes beside each other."""
_FINDINGS: Final = 3
_PARENTS: Final = 2
"""Directories above the pods that the head names, at most; there are seldom more than kubepods and besteffort."""
_HOSTS: Final = 3
"""Host workloads that the head names, at most."""
_BAR: Final = 20
_LEAST_ROWS: Final = 4
"""Lines for pods before the map is cut."""
_UNKNOWN: Final = "?"
_RANK: Final = {"interfered": 0, "suspect": 1}

Line = list[Cell]


class Choices(NamedTuple):
    """What the keys have chosen. ``first``: of the list's pods, the number of the one on top."""

    sort: str = SORTS[0]
    pod_class: str = ""
    text: str = ""
    map: str = MAPS[0]
    first: int = 0
    paused: bool = False
    editing: bool = False
    help: bool = False


class TopFacts(NamedTuple):
    """``pods``: rows of `PodRates`. ``cpus``: the document's ``cpumap``.

    ``problem``: why they are old; empty when they are not.
    """

    body: Row
    pods: Sequence[Row]
    cpus: Sequence[Row]
    interval_s: float
    problem: str = ""


class Page(NamedTuple):
    """``height`` None: as many lines as there are, and no keys. ``whole``: no line is cut, no column left out."""

    width: int
    height: int | None = None
    whole: bool = False


class Glyphs(NamedTuple):
    """``levels``: marks of load, the lowest first. ``bar``: full and empty. ``cut``: end of a text that was cut."""

    levels: str
    bar: str
    cut: str


def glyphs(levels: str) -> Glyphs:
    """By the marks that the terminal's encoding has."""
    return Glyphs(levels, "#.", "~") if levels.isascii() else Glyphs(levels, "█░", "…")


def plain_ascii(text: str) -> str:
    """One line in which every character takes one column."""
    return printable(text).encode("ascii", "backslashreplace").decode()


def shown_pods(pods: Sequence[Row], choices: Choices) -> list[Row]:
    """The pods that the class and the filter leave, in order."""
    words = choices.text.lower().split()
    rows = [
        row
        for row in pods
        if (not choices.pod_class or row["class"] == choices.pod_class)
        and all(word in f"{row['title']} {row['pool']} {row['state']} {row['uid']}".lower() for word in words)
    ]
    sort_rows(rows, choices.sort)
    return rows


def frame(facts: TopFacts, choices: Choices, page: Page, signs: Glyphs) -> list[Line]:
    """The lines of one frame: with a height exactly so many, the last one with the keys."""
    top = list(_head(facts, choices, page, signs))
    height = page.height
    if choices.help:
        lines = [*top, []]
        for keys, text in HELP:
            lines.append([StyledText(f"{keys:<32}", "head"), text])
    else:
        drawn = list(cpu_map(facts, choices.map, page.width, signs)) if choices.map != "off" and facts.cpus else []
        # 3: the empty lines around it, and the keys.
        if height is not None and len(drawn) > (fits := height - len(top) - _LEAST_ROWS - 3):
            # A part of a map would be read as the whole.
            drawn = [[StyledText(f"map: {len(drawn)} lines, {fits} fit; m: off", "dim")]] if fits > 0 else []
        lines = [*top, *([[]] if drawn else []), *drawn, []]
        # 2: the list's headings, and the keys.
        room = None if height is None else max(0, height - len(lines) - 2)
        lines += table(shown_pods(facts.pods, choices), choices, page, room, signs)
    if height is not None:
        lines = lines[: height - 1]
        lines += [[] for _ in range(height - 1 - len(lines))]
        lines.append(_foot(choices, facts))
    return lines if page.whole else [cut(line, page.width, signs.cut) for line in lines]


def cut(cells: Sequence[Cell], width: int, mark: str) -> Line:
    """The cells in at most ``width`` columns; where some are left out, the last column has the ``mark``."""
    result: Line = []
    room = width
    for cell in cells:
        text, style = text_of(cell), style_of(cell)
        if len(text) <= room:
            result.append(cell)
            room -= len(text)
            continue
        if room > 0:
            result.append(StyledText(text[: room - 1] + mark, style))
        elif result:
            last = result.pop()
            result.append(StyledText(text_of(last)[:-1] + mark, style_of(last)))
        break
    return result


# The node


def _head(facts: TopFacts, choices: Choices, page: Page, signs: Glyphs) -> Iterator[Line]:
    agent = facts.body.get("agent", {})
    mode = str(agent.get("mode", "?"))
    ready: Line = [] if agent.get("ready") else [", ", StyledText("not ready", "bad")]
    counts = {name: sum(pod["class"] == name for pod in facts.pods) for name in CLASSES[1:]}
    by_class = "  ".join(f"{name} {count}" for name, count in counts.items() if count)
    window = window_text(agent.get("window") or {})
    named: Line = [StyledText(plain_ascii(f"window {window}"), "dim"), "  "] if window else []
    paused: Line = [StyledText(" paused ", "key"), " "] if choices.paused else []
    yield [
        StyledText(plain_ascii(str(agent.get("node", "?"))), "head"),
        " ",
        StyledText(mode, "ok" if mode == "enforce" else "warn"),
        *ready,
        f"  {fmt.clock(facts.body.get('at'))}  ",
        *paused,
        *named,
        StyledText(f"{fmt.plural(len(facts.pods), 'pod')}{': ' if by_class else ''}{by_class}", "dim"),
    ]
    yield list(_budget(facts, signs))
    for text in parent_texts(facts.pods)[:_PARENTS]:
        yield [StyledText(f"{ABOVE} above   ", "warn"), plain_ascii(text)]
    if rows := agent.get("host_workloads"):
        from reconciler.cli.hosts import top_lines  # only where there are any

        for cells in top_lines(rows, _HOSTS):
            yield [_plain(cell) for cell in cells]
    fields = of_node(facts.body)
    yield ["verdicts  ", *(node_cells(fields) if fields else [StyledText("interference detection is off", "dim")])]
    findings = [row for row in facts.body.get("interference", {}).get("findings", ()) if row["verdict"] in _RANK]
    findings.sort(key=lambda row: (_RANK[row["verdict"]], -row["severity"]))
    for row in findings[:_FINDINGS]:
        yield from _finding(row, page)
    if len(findings) > _FINDINGS:
        yield [StyledText(f"          and {len(findings) - _FINDINGS} more: bypassctl interference", "dim")]


def _finding(row: Row, page: Page) -> Iterator[Line]:
    """A victim and its top suspect; in two lines, if necessary with shortened names, where one has no room for both."""
    victim, *suspects = (
        plain_ascii(title) for title in (row["title"], *(suspect["title"] for suspect in row["suspects"][:1]))
    )
    kind = str(row["verdict"])
    verdict = StyledText(SHOWN.get(kind, kind), STYLES[kind])
    before, lasts, label = "          victim ", f" for {fmt.duration(row['for_s'])}", "top suspect "
    rule = plain_ascii(f"; rule {row['rule']}")
    line: Line = [before, victim, " ", verdict, lasts, *(f", {label}{name}" for name in suspects), rule]
    if page.whole or _length(line) <= page.width:
        yield line
        return
    rest: Line = [" ", verdict, lasts, rule]
    yield [before, shortened(victim, page.width - len(before) - _length(rest)), *rest]
    for name in suspects:
        yield [" " * len(before), label, shortened(name, page.width - len(before) - len(label))]


def _planned(facts: TopFacts) -> str:
    """In observe mode pools and budget are those of a plan that nothing enforces."""
    return "planned, " if facts.body.get("agent", {}).get("mode") == "observe" else ""


def _budget(facts: TopFacts, signs: Glyphs) -> Iterator[Cell]:
    budget = facts.body.get("budget", {})
    amount, used = budget.get("budget_milli"), budget.get("used") or {}
    yield f"BE budget {fmt.cpu(amount)} {_planned(facts)}"
    be = used.get("reclaimed_milli")
    if amount and be is not None:
        full = min(_BAR, round(_BAR * be / amount))
        yield StyledText(signs.bar[0] * full, "warn" if be > amount else "ok")
        yield StyledText(signs.bar[1] * (_BAR - full), "dim")
        yield " "
    if not used:
        yield StyledText("use not measured yet", "dim")
        return
    yield f"used {fmt.cpus(be)}"
    others = f"  online {fmt.cpus(used.get('online_milli'))}  system {fmt.cpus(used.get('system_milli'))}"
    if hosts := used.get("host_be_milli"):
        others += f" (BE host workloads {fmt.cpus(hosts)})"
    yield StyledText(others, "dim")


# The map


def cpu_map(facts: TopFacts, kind: str, width: int, signs: Glyphs) -> Iterator[Line]:
    """A legend, and the CPUs by socket, node, cache, core and thread; as many nodes beside each other as fit."""
    pools = {name: "" for row in facts.cpus for name in row["pools"]}
    letters = {
        name: letter._replace(text=plain_ascii(letter.text))
        for name, letter in marks({name: "" for name in pools if name != "dedicated"}).items()
    }
    if "dedicated" in pools:
        letters["dedicated"] = StyledText("D", "pool dedicated")
    rows = {row["cpu"]: row for row in facts.cpus}
    mark = _load_mark(rows, letters, signs) if kind == "load" else _pool_mark(rows, letters)
    pools_line, mixed = list(_legend(facts.cpus, letters, kind, signs)), _mixed(facts, kind)
    if mixed is not None and _length(pools_line) + len(mixed.text) <= width:
        yield [*pools_line, mixed]
    else:
        yield pools_line
        if mixed is not None:
            yield [mixed]
    digits = len(str(max(rows)))
    blocks: list[list[Line]] = []
    for socket in _placed(facts.cpus)["sockets"]:
        for node in socket["nodes"]:
            title: Line = [StyledText(f"socket {socket['id']}  node {node['id']}", "head")]
            drawn = [list(item.cells) for item in node_rows(node, mark, digits, width)]
            blocks.append([title, *drawn])
    yield from _beside(blocks, width)


def _placed(cpus: Sequence[Row]) -> Row:
    from state.topology import Cpu, CpuKind, Topology  # msgspec; only where a map is drawn

    keys = ("core", "socket", "node", "l3", "thread")
    items = tuple(
        Cpu(
            id=row["cpu"],
            kind=CpuKind.EFFICIENCY if row["kind"] == "E" else CpuKind.PERFORMANCE,
            **{key: int(row[key]) for key in keys},
        )
        for row in sorted(cpus, key=lambda row: int(row["cpu"]))
    )
    return placement(Topology(online=CpuSet(item.id for item in items), cpus=items), {})


def _style(row: Row, letters: Mapping[str, StyledText]) -> tuple[str, str, bool]:
    """Letter and style of a CPU's strictest pool, and whether BE work runs there beside it."""
    if not row["pools"]:
        return ".", "dim", False
    first = row["pools"][0]
    return letters[first].text, letters[first].style, first != RECLAIMED and RECLAIMED in row["pools"]


def _pool_mark(rows: Mapping[int, Row], letters: Mapping[str, StyledText]) -> Callable[[int], StyledText]:
    def mark(cpu: int) -> StyledText:
        letter, style, shared = _style(rows[cpu], letters)
        return StyledText(letter.lower(), f"{style} be") if shared else StyledText(letter, style)

    return mark


def _load_mark(
    rows: Mapping[int, Row], letters: Mapping[str, StyledText], signs: Glyphs
) -> Callable[[int], StyledText]:
    def mark(cpu: int) -> StyledText:
        _, style, shared = _style(rows[cpu], letters)
        known = rows[cpu]["busy_percent"]
        top = len(signs.levels) - 1
        sign = _UNKNOWN if known is None else signs.levels[min(top, max(0, int(known * (top + 1) / 100)))]
        ink = style if style == "dim" else f"{style} be"
        return StyledText(sign, f"{ink} +underline" if shared else ink)

    return mark


def _legend(cpus: Sequence[Row], letters: Mapping[str, StyledText], kind: str, signs: Glyphs) -> Iterator[Cell]:
    yield f"{fmt.plural(len(cpus), 'CPU')}{f', load {signs.levels}' if kind == 'load' else ''}  "
    for name, letter in letters.items():
        count = sum(name in row["pools"] for row in cpus)
        yield StyledText(letter.text, letter.style if kind == "pools" else f"{letter.style} be")
        yield StyledText(f" {plain_ascii(name)} {count}  ", "dim")


def _mixed(facts: TopFacts, kind: str) -> StyledText | None:
    if not any(row["pools"][:1] != [RECLAIMED] and RECLAIMED in row["pools"] for row in facts.cpus):
        return None
    return StyledText(f"{'underlined' if kind == 'load' else 'lower case'}: {_planned(facts)}BE work, too", "dim")


def _beside(blocks: Sequence[Sequence[Line]], width: int) -> Iterator[Line]:
    """Blocks of equal width beside each other, as many as fit."""
    widest = max((_length(line) for block in blocks for line in block), default=0)
    across = max(1, (width + _GAP) // (widest + _GAP))
    for start in range(0, len(blocks), across):
        row = blocks[start : start + across]
        for number in range(max(map(len, row))):
            line: Line = []
            for block in row:
                cells = block[number] if number < len(block) else []
                if line:
                    line.append(" " * _GAP)
                line += [*cells, " " * (widest - _length(cells))]
            yield line


def _length(cells: Sequence[Cell]) -> int:
    return sum(len(text_of(cell)) for cell in cells)


def _plain(cell: Cell) -> Cell:
    return StyledText(plain_ascii(text_of(cell)), style_of(cell))


# The pods


def table(pods: Sequence[Row], choices: Choices, page: Page, height: int | None, signs: Glyphs) -> Iterator[Line]:
    """The headings, and at most ``height`` pods from ``choices.first`` on."""
    if not pods:
        chosen = choices.text or choices.pod_class
        yield [StyledText("no such pod: Esc removes the filter, c the class" if chosen else "no pods", "dim")]
        return
    names = [plain_ascii(row["title"]) for row in pods]
    columns = list(_COLUMNS)
    if page.whole:
        every = [pod_cells(row) for row in pods]
        sizes = {name: max(len(plain_ascii(text_of(cells[name]))) for cells in every) for name in ("POOL", "CPUS")}
        columns = [(name, max(size, sizes.get(name, 0))) for name, size in _COLUMNS]
    need = min(max(map(len, names)), _NAME)
    for name in _DROPPED_FIRST:
        if page.whole or sum(size + 2 for _, size in columns) + need <= page.width:
            break
        columns = [column for column in columns if column[0] != name]
    sorted_by = _HEAD_OF.get(choices.sort, choices.sort.upper())
    heads: Line = []
    for name, size in [*columns, ("POD", 0)]:
        text = name.rjust(size) if name in AMOUNTS else name.ljust(size)
        heads += [StyledText(text, "key" if name == sorted_by else "dim"), "  "]
    yield heads
    first = first_row(choices.first, len(pods), height)
    last = len(pods) if height is None else min(len(pods), first + height)
    left = sum(size + 2 for _, size in columns)
    for row, title in zip(pods[first:last], names[first:last], strict=True):
        cells = pod_cells(row)
        line: Line = []
        for name, size in columns:
            text, style = plain_ascii(text_of(cells[name])), style_of(cells[name])
            text = text if len(text) <= size or page.whole else text[: size - 1] + signs.cut
            line += [StyledText(text.rjust(size) if name in AMOUNTS else text.ljust(size), style), "  "]
        yield [*line, title if page.whole else shortened(title, page.width - left)]


def first_row(wanted: int, count: int, height: int | None) -> int:
    """The number of the pod on top: no line of the list stays empty while pods are above it."""
    return 0 if height is None else max(0, min(wanted, count - height))


def _foot(choices: Choices, facts: TopFacts) -> Line:
    if choices.editing:
        return [StyledText("filter: ", "head"), plain_ascii(choices.text), StyledText(" ", "key")]
    if facts.problem:
        return [StyledText(plain_ascii(facts.problem), "bad")]
    keys = (
        ("q", "quit"),
        ("?", "help"),
        ("/", plain_ascii(choices.text) or "filter"),
        ("s", choices.sort),
        ("c", choices.pod_class or "all"),
        ("m", choices.map),
        ("p", "continue" if choices.paused else "pause"),
        ("+-", fmt.duration(facts.interval_s)),
    )
    return [cell for key, text in keys for cell in (StyledText(key, "head"), StyledText(f" {text}  ", "dim"))]
