"""Builds the documents as a site: ``python deploy/site.py`` (``make site``), with mkdocs, into dist/site.

The documents, and the files beside them that they link to, are copied to where mkdocs reads them, in the same places
relative to each other: a link that works in the repository works in the site. The build fails for a broken link or
anchor, a page outside of the navigation, a list or table that became a paragraph, and a page that loads anything from
elsewhere.
"""

import re
import shutil
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
SOURCE: Final = ROOT / "dist" / "site-source"
SITE: Final = ROOT / "dist" / "site"
TEXTS: Final = ("README.md", "CHANGELOG.md")
"""The documents outside of docs/."""

_LINK: Final = re.compile(r"\]\(([^)#\s]+)")
_ELSEWHERE: Final = re.compile(r"(?:[a-z]+:)?//", re.IGNORECASE)
_LOADED_BY_CSS: Final = re.compile(r"""(?:url\(|@import)\s*["']?((?:[a-z]+:)?//[^"')\s;]+)""", re.IGNORECASE)
_LIST_CODE: Final = 4
_FOLLOWED: Final = frozenset({"a", "area"})
"""Elements whose address is only opened by a click."""
_UNMADE: Final = re.compile(r"^(?:[-*+] |\d+\. |\|.*\|$|```)", re.MULTILINE)


def sources() -> dict[str, Path]:
    """What the site is made of: each file by its path within the repository."""
    files = [ROOT / name for name in TEXTS]
    files += [path for path in sorted((ROOT / "docs").rglob("*")) if path.is_file()]
    for document in [path for path in files if path.suffix == ".md"]:
        targets = [document.parent / name for name in _LINK.findall(document.read_text()) if ":" not in name]
        files += [path.resolve() for path in targets if path.is_file()]
    return {str(path.relative_to(ROOT)): path for path in files}


def slug(title: str, separator: str) -> str:
    """The anchor of a heading, as code hosts make it: mkdocs would merge the blanks around what it drops.

    One that begins with a digit gets a letter before it: the theme's script fails on every page with such an anchor.
    """
    name = re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", separator)
    return f"v{name}" if name[:1].isdigit() else name


def lost_code(text: str) -> list[str]:
    """Blocks of code in a list that are indented for a marker of three characters: to mkdocs they are text."""
    lost, before, blank = [], "", True
    for line in text.splitlines():
        indent = len(line) - len(line.lstrip())
        if blank and line.strip() and _LIST_CODE < indent < 2 * _LIST_CODE and not before.startswith(" " * _LIST_CODE):
            lost.append(f"code within a list: {line.strip()!r}: indent it by eight, and the list's items by four")
        blank = not line.strip()
        before = line if line.strip() else before
    return lost


class _Faults(HTMLParser):
    """Collects what a page loads from elsewhere, and Markdown that is still there as text of a paragraph."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self._paragraph: list[str] | None = None
        self._style = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note each address of another machine that is opened without a click."""
        if tag == "p":
            self._paragraph = []
        elif tag == "code" and self._paragraph is not None:
            self._paragraph.append("`")
        self._style = tag == "style"
        for name, value in attrs:
            text = (value or "").strip()
            if name == "style":
                self._css(text)
            if tag in _FOLLOWED or name not in {"src", "href", "srcset", "data", "poster", "action", "xlink:href"}:
                continue
            if _ELSEWHERE.match(text):
                self.found.append(f"loads {text}")

    def handle_endtag(self, tag: str) -> None:
        """Look at a whole paragraph."""
        self._style = False
        if tag == "code" and self._paragraph is not None:
            self._paragraph.append("`")
        if tag == "p" and self._paragraph is not None:
            text = "".join(self._paragraph)
            self.found += [f"not rendered: {match[0].strip()} in: {text[:60]!r}" for match in _UNMADE.finditer(text)]
            self._paragraph = None

    def handle_data(self, data: str) -> None:
        """Gather the text of a paragraph."""
        if self._style:
            self._css(data)
        elif self._paragraph is not None:
            self._paragraph.append(data)

    def _css(self, text: str) -> None:
        self.found += [f"loads {address}" for address in _LOADED_BY_CSS.findall(text)]


def faults(site: Path) -> list[str]:
    """Every fault of the built files, with the file's name."""
    found = []
    for path in sorted(site.rglob("*")):
        if path.suffix == ".html":
            parser = _Faults()
            parser.feed(path.read_text())
            found += [f"{path.relative_to(site)}: {text}" for text in parser.found]
        elif path.suffix in {".css", ".svg"}:
            addresses = _LOADED_BY_CSS.findall(path.read_text())
            found += [f"{path.relative_to(site)}: loads {address}" for address in addresses]
    return found


def main() -> int:
    """Copy, build and check. Exit code 1 with the faults; mkdocs' own end it too."""
    from mkdocs.commands.build import build
    from mkdocs.config import load_config
    from mkdocs.exceptions import Abort

    shutil.rmtree(SOURCE, ignore_errors=True)
    for name, path in sources().items():
        (SOURCE / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, SOURCE / name)
    config = load_config(str(ROOT / "mkdocs.yml"))
    config["mdx_configs"]["toc"]["slugify"] = slug
    try:
        build(config)
    except Abort as exc:
        print(exc, file=sys.stderr)
        return 1
    texts = [(name, path.read_text()) for name, path in sources().items() if path.suffix == ".md"]
    found = [f"{name}: {fault}" for name, text in texts for fault in lost_code(text)] + faults(SITE)
    print("\n".join([*found, f"{SITE}: {len(list(SITE.rglob('*.html')))} pages, {len(found)} faults"]))
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
