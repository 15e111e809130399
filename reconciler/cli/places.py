"""Paths of the daemon's socket and store: the command line's, else the configuration's, else the usual ones."""

import json
import os
import re
from argparse import Namespace
from typing import Final, NamedTuple

from reconciler.cli.exits import CliError, Exit

DEFAULT_CONFIG: Final = "/etc/bypassd/config.yaml"
DEFAULT_SOCKET: Final = "/run/bypassd/bypassd.sock"
DEFAULT_READER: Final = "/run/bypassd/reader.sock"
DEFAULT_STORE: Final = "/var/lib/bypassd/state.db"
ABOUT: Final = "bypassd-capture/about.json"
"""What a capture says of itself."""
_LONGEST_PATH: Final = 4096
# A configuration without paths is not loaded: that costs as much as all the rest of the program.
_SPEAKS: Final = re.compile(rb"""^[^#\n]*\b(?:socket|reader_socket|path|root)["']?\s*:""", re.MULTILINE)


class AgentPaths(NamedTuple):
    """``socket`` None: the configuration has none. ``reader``: the readers' socket; None where it is not to be used."""

    socket: str | None
    store: str
    reader: str | None = None


def find(options: Namespace) -> AgentPaths:
    """Both places. Errors: `CliError` for a configuration that names them and is wrong."""
    root = options.root
    socket: str | None = DEFAULT_SOCKET
    reader: str | None = DEFAULT_READER
    store = DEFAULT_STORE
    if (options.socket is None or options.store is None) and _config_speaks(options):
        socket, reader, store = _configured(options)
    if root != "/":
        # A copied node has a store, but no daemon.
        socket, reader, store = None, None, os.path.join(root, store.lstrip("/"))
    if options.socket is not None:
        reader = None
    return AgentPaths(options.socket or socket, options.store or store, reader)


def config_path(options: Namespace) -> str:
    """The configuration file, root prefix included: the command line's, the capture's, else the usual one."""
    if options.config is not None:
        return str(options.config)
    captured = _captured(options.root) if options.root != "/" else None
    return os.path.join(options.root, (captured or DEFAULT_CONFIG).lstrip("/"))


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


def _config_speaks(options: Namespace) -> bool:
    path = config_path(options)
    if options.config is not None and not os.path.exists(path):
        raise CliError(f"{path}: no such file", Exit.USAGE)
    directory = os.path.join(os.path.dirname(path), "conf.d")
    try:
        more = [os.path.join(directory, name) for name in os.listdir(directory) if name.endswith(".yaml")]
    except OSError:
        more = []
    return any(_SPEAKS.search(_content(text)) for text in (path, *more))


def _content(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""


def _configured(options: Namespace) -> tuple[str | None, str | None, str]:
    from reconciler.config import load  # 50 ms, only where the configuration names places
    from reconciler.settings.binder import ConfigError

    try:
        config = load.load(config_path(options)).config
    except ConfigError as exc:
        raise CliError(str(exc), Exit.USAGE, lines=exc.problems) from exc
    return config.http.socket, config.http.reader_socket, config.store.path
