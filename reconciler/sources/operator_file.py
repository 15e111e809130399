"""The operator's own file that names classes, where no cluster-wide label can.

    overrides:
    - class: shared
      pod: payments/api-*          # namespace/name, each may have * and ?
      reason: latency agreement of the checkout
    - class: reclaimed
      labels: {matchLabels: {team: batch}}
    - class: dedicated
      uid: 6f1d0c5e-9d0c-4b63-9a3c-0a0f6d0b7a11

The first entry that fits wins. A bad entry is one message with file, line and column, and the others hold.
"""

import os
from typing import Final, final

from msgspec import Struct
from msgspec.structs import replace

from cgroupfs.errors import InputError
from reconciler.pods.selectors import ClassOverride
from reconciler.runtime.safe_files import FileRule, read_file
from reconciler.settings.binder import ConfigError, Text, bind_usable

NAME: Final = "operator file"

_LARGEST: Final = 4 * 1024 * 1024


class Overrides(Struct, frozen=True, kw_only=True):
    """The entries that hold, in the file's order, and every problem of the file."""

    overrides: tuple[ClassOverride, ...] = ()
    problems: tuple[str, ...] = ()


class _File(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The keys of the file."""

    overrides: tuple[ClassOverride, ...] = ()


def read_overrides(text: str, where: str) -> Overrides:
    """The entries of one file's text. An empty file has none.

    Errors: `ConfigError` when nothing of it can be used: no YAML, or not of this form.
    """
    bound = bind_usable(_File, Text(where, text), largest=_LARGEST)
    base = os.path.basename(where)
    return Overrides(
        overrides=tuple(
            replace(override, origin=f"{base}:{bound.origins[f'overrides[{index}]'].line}")
            for index, override in enumerate(bound.value.overrides)
        ),
        problems=tuple(map(str, bound.problems)),
    )


@final
class OperatorFile:
    """The file at ``path``, read again when it changes. Without a file there are no overrides and no problem."""

    def __init__(self, path: str, root: str = "/") -> None:
        self._path = path
        self._root = root
        self._file = os.path.join(root, path.lstrip("/"))
        self._version: object = None
        self._overrides = Overrides()

    def read(self) -> Overrides:
        """What holds now. Never raises: what cannot be used is in ``problems``.

        A file that is not YAML leaves the last good entries in force, as a reload of the configuration does.
        """
        try:
            stat = os.stat(self._file)
        except FileNotFoundError:
            self._version, self._overrides = None, Overrides()
            return self._overrides
        except OSError as exc:
            return self._unread(exc)
        version = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
        if version == self._version:
            return self._overrides
        self._version = version
        if stat.st_size > _LARGEST:
            return self._keep(str(InputError(self._path, stat.st_size, "at most 4 MiB")))
        try:
            content = read_file(self._path, FileRule.OPERATOR, root=self._root, largest=_LARGEST)
            self._overrides = read_overrides(content.decode(), self._path)
        except OSError as exc:
            return self._unread(exc)
        except UnicodeDecodeError:
            return self._keep(f"{self._path}: not UTF-8 text")
        except ConfigError as exc:
            return self._keep(str(exc))
        return self._overrides

    def _unread(self, exc: OSError) -> Overrides:
        # It may become readable without a change: no version, so it is read again.
        self._version = None
        return self._keep(f"{self._path}: {exc.strerror or exc}")

    def _keep(self, problem: str) -> Overrides:
        kept = len(self._overrides.overrides)
        note = f"; the {kept} overrides read before still apply" if kept else ""
        self._overrides = Overrides(overrides=self._overrides.overrides, problems=(problem + note,))
        return self._overrides
