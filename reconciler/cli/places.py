"""Paths of the daemon's socket and store: the command line's, else the configuration's, else the usual ones."""

import json
import os
import re
from argparse import Namespace
from typing import TYPE_CHECKING, Final, NamedTuple

from cgroupfs.bounded import read_file
from cgroupfs.errors import errno_name
from reconciler.cli.exits import CliError, Exit

if TYPE_CHECKING:
    from reconciler.config.load import Loaded
    from reconciler.config.node_settings import KeptSettings
    from reconciler.settings.schema import Schema

DEFAULT_CONFIG: Final = "/etc/bypassd/config.yaml"
DEFAULT_SOCKET: Final = "/run/bypassd/bypassd.sock"
DEFAULT_READER: Final = "/run/bypassd/reader.sock"
DEFAULT_STORE: Final = "/var/lib/bypassd/state.db"
ABOUT: Final = "bypassd-capture/about.json"
"""What a capture says of itself."""
_LONGEST_PATH: Final = 4096
_LARGEST: Final = 4 << 20
"""Bytes of a configuration file, as for the daemon."""
# A configuration without paths is not loaded: that costs as much as all the rest of the program.
_PATH_KEYS: Final = re.compile(rb"""^[^#\n]*\b(?:socket|reader_socket|path|root)["']?\s*:""", re.MULTILINE)
_PATH: Final = re.compile(r"/[A-Za-z0-9._/-]+")
_SECTIONS: Final = {"http": frozenset({"socket", "reader_socket"}), "store": frozenset({"path"})}


class AgentPaths(NamedTuple):
    """``reader``: the readers' socket; None where it is not to be used. ``absent``: why ``socket`` is None."""

    socket: str | None
    store: str
    reader: str | None = None
    absent: str = "no socket configured"


def find(options: Namespace) -> AgentPaths:
    """Both places. Errors: `CliError`, and `ConfigError` for a configuration that names them and is wrong."""
    root = options.root
    socket: str | None = DEFAULT_SOCKET
    reader: str | None = DEFAULT_READER
    store = DEFAULT_STORE
    if (options.socket is None or options.store is None) and _config_has_paths(options):
        socket, reader, store = _configured(options)
    if root != "/":
        # A copied node has a store, but no daemon.
        socket, reader, store = None, None, os.path.join(root, store.lstrip("/"))
    if options.socket is not None:
        reader = None
    paths = AgentPaths(options.socket or socket, options.store or store, reader)
    return paths if root == "/" else paths._replace(absent="copied node")


def config_path(options: Namespace) -> str:
    """The configuration file, root prefix included: the command line's, the capture's, else the usual one."""
    if options.config is not None:
        return str(options.config)
    captured = _captured(options.root) if options.root != "/" else None
    return os.path.join(options.root, (captured or DEFAULT_CONFIG).lstrip("/"))


def with_node_settings(
    options: Namespace, loaded: "Loaded", top: "Schema | None" = None
) -> tuple["Loaded", tuple[str, ...]]:
    """The configuration with the control plane's last settings of this node; and those that are not taken, with why.

    ``top``: as of `load`.
    """
    kept = kept_settings(options, loaded)
    if kept is None:
        return loaded, ()
    from reconciler.config.node_settings import in_force  # few nodes have some

    found = in_force(loaded, kept, top)
    return found.loaded, found.left


def kept_settings(options: Namespace, loaded: "Loaded") -> "KeptSettings | None":
    """The control plane's last settings of this node; None: none are wanted, or known."""
    if loaded.config.apiserver.node_settings == "off":
        return None
    from reconciler.config.node_settings import kept_in  # as above

    return kept_in(_store_of(options, loaded))


def hidden_settings(options: Namespace, loaded: "Loaded") -> str | None:
    """Why a control plane's settings of this node, which count, cannot be shown to this user; None: they can."""
    if loaded.config.apiserver.node_settings == "off":
        return None
    store = _store_of(options, loaded)
    try:
        os.stat(store)
    except PermissionError:
        pass
    except OSError:
        return None
    else:
        if os.access(store, os.R_OK, effective_ids=True):
            return None
    return f"{store}: permission denied: run with sudo; the control plane's settings of this node are not shown"


def _store_of(options: Namespace, loaded: "Loaded") -> str:
    return str(options.store or os.path.join(options.root, loaded.config.store.path.lstrip("/")))


def _captured(root: str) -> str | None:
    """The configuration with which a capture was made, as a path within the root; None: not recorded."""
    from reconciler.runtime.safe_files import FileRule, read_file

    try:
        about = json.loads(read_file(f"/{ABOUT}", FileRule.OPERATOR, root=os.path.abspath(root)))
        path = about.get("config")
    except (OSError, ValueError, AttributeError, RecursionError):
        return None
    if not isinstance(path, str) or not path or "\0" in path or len(path) > _LONGEST_PATH:
        return None
    return os.path.normpath(f"/{path.lstrip('/')}")


def _config_has_paths(options: Namespace) -> bool:
    return any(_PATH_KEYS.search(_content(name, required=options.config == name)) for name in _files(options))


def _files(options: Namespace) -> list[str]:
    """The configuration's files; a later one counts."""
    path = config_path(options)
    directory = os.path.join(os.path.dirname(path), "conf.d")
    try:
        more = sorted(name for name in os.listdir(directory) if name.endswith(".yaml") and name[0] != ".")
    except PermissionError as exc:
        raise CliError(f"{directory}: permission denied: run with sudo", Exit.UNREACHABLE) from exc
    except OSError:
        more = []
    return [path, *(os.path.join(directory, name) for name in more)]


def _content(path: str, *, required: bool = False) -> bytes:
    """Errors: `CliError` where this user may not read it: other places than its own would be shown as those in use."""
    try:
        return read_file(path, _LARGEST, pipes=True)
    except PermissionError as exc:
        raise CliError(f"{path}: permission denied: run with sudo", Exit.UNREACHABLE) from exc
    except FileNotFoundError as exc:
        if required:
            raise CliError(f"{path}: no such file", Exit.USAGE) from exc
        return b""
    except OSError as exc:
        if required:
            raise CliError(f"{path}: cannot be read: {errno_name(exc.errno)}", Exit.USAGE) from exc
        return b""


def _configured(options: Namespace) -> tuple[str | None, str | None, str]:
    """By the configuration's reader alone where it has plain paths, else by its models.

    The models cost four times as much CPU as all the rest of ``bypassctl holds``.
    """
    # Only where the configuration names places.
    from reconciler.settings.nodes import ConfigProblem, Mapping, Scalar
    from reconciler.settings.yaml import parse_tree

    found = {"socket": DEFAULT_SOCKET, "reader_socket": DEFAULT_READER, "path": DEFAULT_STORE}
    problems: list[ConfigProblem] = []
    plain = True
    for path in _files(options):
        tree = parse_tree(path, _content(path).decode(errors="replace"), problems)
        top = tree.items if isinstance(tree, Mapping) else {}
        for section, keys in _SECTIONS.items():
            part = top.get(section)
            values = part.items if isinstance(part, Mapping) else {}
            plain = plain and isinstance(tree, Mapping) and (part is None or isinstance(part, Mapping))
            for key in keys & values.keys():
                value = values[key]
                plain = plain and isinstance(value, Scalar) and _PATH.fullmatch(value.text) is not None
                found[key] = getattr(value, "text", "")
    if plain and not problems:
        return found["socket"], found["reader_socket"], found["path"]
    from reconciler.config import load

    config = load.load(config_path(options)).config
    return config.http.socket, config.http.reader_socket, config.store.path
