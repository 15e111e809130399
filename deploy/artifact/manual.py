"""Manual pages: `roff` renders one of docs/*.N.md for man(1).

The text is parsed by markdown-it. For 80 columns, a table becomes a list: its first column is the tag, the others the
text. A paragraph whose second line begins with a colon is an entry of such a list too. Output is ASCII, in the macros
of man(7) that groff 1.22 and mandoc have, and depends on the arguments alone.
"""

import re
import textwrap
from collections.abc import Iterator
from typing import Final

from markdown_it import MarkdownIt
from markdown_it.tree import SyntaxTreeNode

WIDTH: Final = 78
EXAMPLE_WIDTH: Final = 71
"""Of an example's line on a screen of 80 columns."""
LONG_WORD: Final = 40
SECTIONS: Final = {"1": "User Commands", "8": "System Administration"}
ESCAPES: Final = {"\\": "\\e", "`": "\\(ga", "^": "\\(ha", "~": "\\(ti", "'": "\\(aq"}


class ManualError(Exception):
    """What of a page cannot be rendered, in one line."""


def roff(markdown: str, date: str, source: str) -> str:
    """A manual page. ``date`` is an ISO date, ``source`` name and version. Errors: `ManualError`."""
    title, *nodes = SyntaxTreeNode(MarkdownIt("commonmark").enable("table").parse(markdown)).children
    match = re.fullmatch(r"([\w-]+)\(([18])\)", title.children[0].content) if title.tag == "h1" else None
    if match is None:
        raise ManualError("expected a title like # name(8)")
    name, section = match.groups()
    lines = [
        f'.TH {name.upper()} {section} {date} "{source}" "{SECTIONS[section]}"',
        ".nh",  # names of files and settings are not hyphenated
        ".ad l",
    ]
    heading = ""
    for node in nodes:
        if node.tag == "h2":
            heading = node.children[0].content
        text = list(block(node))
        if heading == "Name" and node.type == "paragraph":
            # The form that whatis(1) and apropos(1) index.
            text[1:] = fill(re.sub(r" - |: ", r" \\- ", " ".join(text[1:]), count=1))
        first_below = bool(lines) and lines[-1].startswith((".SH", ".SS"))
        lines += text[1:] if first_below and text[0] == ".PP" else text
    return "\n".join(lines) + "\n"


def upper(text: str) -> str:
    """In capitals, but for the names of special characters."""
    return re.sub(r"\\\(..|[^\\]+", lambda part: part[0] if part[0].startswith("\\(") else part[0].upper(), text)


def block(node: SyntaxTreeNode) -> Iterator[str]:
    """The lines of one block. Errors: `ManualError` for a kind that the pages do not have yet."""
    match node.type:
        case "heading":
            text = inline(node.children[0])
            yield f".SH {upper(text)}" if node.tag == "h2" else f".SS {text}"
        case "paragraph":
            yield from paragraph(inline(node.children[0]))
        case "code_block" | "fence":
            yield from (".PP", ".RS 2", ".nf")
            for line in node.content.rstrip("\n").split("\n"):
                yield from (protect(escape(part, literal=True)) for part in fold(line))
            yield from (".fi", ".RE")
        case "bullet_list" | "ordered_list":
            for number, item in enumerate(node.children, 1):
                mark = r"\(bu 2" if node.type == "bullet_list" else f"{number}. 4"
                yield from (f".IP {mark}", *fill(inline(item.children[0].children[0])))
                for rest in item.children[1:]:
                    yield from (".RS", *block(rest), ".RE")
        case "table":
            yield from table(node)
        case other:
            raise ManualError(f"cannot render {other}")


def paragraph(text: str) -> Iterator[str]:
    """A paragraph, or an entry of a list of definitions."""
    first, _, rest = text.partition("\n")
    if rest.startswith(": "):
        yield from (".TP", protect(first), *fill(rest[2:]))
    else:
        yield from (".PP", *fill(text))


def table(node: SyntaxTreeNode) -> Iterator[str]:
    """A list with an entry for each row; from the third column on, a cell follows the head of its column."""
    head, *bodies = node.children
    names = [inline(cell.children[0]) for cell in head.children[0].children]
    for row in (row for body in bodies for row in body.children):
        tag, text, *others = (inline(cell.children[0]) if cell.children else "" for cell in row.children)
        parts = [text, *(f"{name}: {cell}" for name, cell in zip(names[2:], others, strict=True) if cell)]
        yield from (".TP", protect(tag), *fill("; ".join(filter(None, parts))))


def inline(node: SyntaxTreeNode) -> str:
    """Text with fonts; lines as in the source. A link is its text: its target is a path of the repository."""
    parts = []
    for child in node.children:
        match child.type:
            case "text":
                parts.append(escape(child.content))
            case "softbreak":
                parts.append("\n")
            case "code_inline":
                text = escape(child.content, literal=True)
                if max(map(len, child.content.split()), default=0) > LONG_WORD:
                    text = text.replace("/", "/\\:")
                parts.append(f"\\fB{text}\\fR")
            case "strong":
                parts.append(f"\\fB{inline(child)}\\fR")
            case "em" | "link":
                parts.append(f"\\fI{inline(child)}\\fR")
            case other:
                raise ManualError(f"cannot render {other}")
    return "".join(parts)


def escape(text: str, *, literal: bool = False) -> str:
    """Text that roff prints as it is. ``literal`` has minus signs, to be copied from the screen, not hyphens."""
    changed = {**ESCAPES, "-": "\\-"} if literal else ESCAPES
    return "".join(changed.get(char, char if char.isascii() else f"\\[u{ord(char):04X}]") for char in text)


def fold(line: str) -> list[str]:
    """A line of an example, in parts that fit the screen; the shell reads the parts of a command as one."""
    start = line[: len(line) - len(line.lstrip())]
    command = line[len(start) :].startswith(("# ", "$ "))
    wrap = textwrap.TextWrapper(EXAMPLE_WIDTH - 2 * command, break_long_words=False, break_on_hyphens=False)
    wrap.subsequent_indent = f"{start}    "
    parts = wrap.wrap(line)
    return [*(f"{part} \\" if command else part for part in parts[:-1]), *(parts[-1:] or [""])]


def fill(text: str) -> list[str]:
    """Text in lines of the source's width."""
    lines = textwrap.wrap(text, WIDTH, break_long_words=False, break_on_hyphens=False)
    return [protect(line) for line in lines]


def protect(line: str) -> str:
    """A line that is no request, whatever it begins with."""
    return f"\\&{line}" if line.startswith((".", "'")) else line
