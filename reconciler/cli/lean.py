"""Two libraries imported at less cost, for a program that ends after a tenth of a second. Nothing of them is left out.

- msgspec takes three names from ``typing_extensions`` where that is installed; `typing` has them since Python 3.11. The
  library imports `inspect`, and with it Python's own compiler: 5 ms.
- PyYAML compiles the patterns of its reader in Python, one of which is a table of Unicode. libyaml reads here, and uses
  none of them: 4 ms. What msgspec imports has some more.

Only for a program with one thread: while one of the two is imported, ``re.compile`` makes patterns that are compiled at
their first use.
"""

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, final

if TYPE_CHECKING:
    from importlib.abc import Loader  # at run time with all that belongs to resources in packages

_LIBRARIES: Final = frozenset({"msgspec", "yaml"})
_UNUSED: Final = "typing_extensions"


def install() -> None:
    """Have the libraries imported so, whichever module is the first to import them. A second call changes nothing."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


@final
class _Finder:
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The usual place of one of the libraries; None for every other module."""
        if fullname not in _LIBRARIES:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            # It has the two methods that the import system calls; their class imports the archives' readers.
            spec.loader = _Loader(spec.loader)  # type: ignore[assignment]
        return spec


@final
class _Loader:
    def __init__(self, usual: "Loader") -> None:
        self._usual = usual

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """As the usual loader."""
        return self._usual.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Execute the module, and with it what it imports."""
        with _patterns_later(), _without(_UNUSED):
            self._usual.exec_module(module)


@contextmanager
def _without(name: str) -> Iterator[None]:
    """Let ``import name`` fail as if it were not installed, unless it is imported already."""
    if name in sys.modules:
        yield
        return
    # None in this table makes the import fail with ModuleNotFoundError; its type does not have it.
    sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[name]


@contextmanager
def _patterns_later() -> Iterator[None]:
    usual = re.compile

    def later(pattern: Any, flags: int | re.RegexFlag = 0) -> Any:
        return _Pattern(usual, pattern, flags)

    re.compile = later
    try:
        yield
    finally:
        re.compile = usual


@final
class _Pattern:
    """A pattern that is compiled at its first use."""

    # Any: the arguments and attributes of `re.compile`, of text and of bytes.
    def __init__(self, compiler: Callable[..., Any], pattern: Any, flags: int | re.RegexFlag) -> None:
        self._compiler, self._arguments = compiler, (pattern, flags)

    def __getattr__(self, name: str) -> Any:
        compiled = self._compiler(*self._arguments)
        self.__dict__.update((key, getattr(compiled, key)) for key in dir(compiled) if not key.startswith("__"))
        return getattr(compiled, name)
