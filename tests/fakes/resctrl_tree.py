"""Directories and files of the resctrl model."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tests.fakes.resctrl_groups import Group

Reader = Callable[[], str]
Writer = Callable[[str, int], None]


@dataclass(eq=False, slots=True)
class File:
    """A file; ``write`` None: it may only be read."""

    name: str
    inode: int
    directory: "Dir"
    read: Reader
    write: Writer | None

    @property
    def mode(self) -> int:
        return 0o444 if self.write is None else 0o644

    @property
    def alive(self) -> bool:
        return self.directory.alive

    @property
    def path(self) -> str:
        return f"{self.directory.path}/{self.name}"


@dataclass(eq=False, slots=True)
class Dir:
    """A directory; ``group`` is the one that it and all directly in it belongs to."""

    name: str
    inode: int
    parent: "Dir | None"
    mode: int
    group: Group | None = None
    inside: "dict[str, Dir | File]" = field(default_factory=dict)
    alive: bool = True

    @property
    def path(self) -> str:
        """From the root, whose own is empty."""
        return "" if self.parent is None else f"{self.parent.path}/{self.name}"

    def texts(self) -> Iterator[tuple[str, str]]:
        """Path from the root, and what it reads now, of every file in it and below."""
        for node in self.inside.values():
            if isinstance(node, File):
                yield node.path.removeprefix("/"), node.read()
            else:
                yield from node.texts()

    def kill(self) -> None:
        """Removed, with all that is in it."""
        self.alive = False
        for node in self.inside.values():
            if isinstance(node, Dir):
                node.kill()
