"""Completion of the shells: the files in deploy/completion, and the names that they ask the program for.

``python -m reconciler.cli.completion`` (in the project's directory) makes the files from the command line's own
declaration; a test compares them. ``bypassctl __complete KIND PREFIX [WORD...]`` prints names, one a line; it is hidden
from the help.

Shells expand words: they read the names as lines and never expand them, and the program is the one of the search path,
never a file that is only named so.
"""

import os
import re
import signal
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from cgroupfs.errors import AgentError
from reconciler.cli import places
from reconciler.cli.document import Row, get, of_namespace
from reconciler.runtime import streams

FILES: Final = {
    "bash": "deploy/completion/bypassctl.bash",
    "zsh": "deploy/completion/_bypassctl",
    "fish": "deploy/completion/bypassctl.fish",
}
_REGISTERED: Final = "-F _shtab_bypassctl bypassctl"
_BASH: Final = r"""
_bypassctl_names() {
  command bypassctl __complete "$1" "$2" "${COMP_WORDS[@]}" 2>/dev/null </dev/null
}

_bypassctl_keys() {
  local key
  for key in "${_bypassctl_settings[@]}"; do [[ "$key" == "$1"* ]] && echo "$key"; done
}

# COMP_WORDS is divided at colons, too: a target such as pod:NAME is one word here.
_bypassctl() {
  local line="${COMP_LINE:0:COMP_POINT}" colons=0
  local -a words
  read -r -a words <<<"$line"
  [[ "$line" == *[[:space:]] ]] && words+=("")
  if [[ "$COMP_WORDBREAKS" == *:* && "${words[-1]}" == *:* ]]; then
    colons="${words[-1]%:*}:"
    colons=${#colons}
  fi
  local -a COMP_WORDS=("${words[@]}")
  local COMP_CWORD=$(( ${#words[@]} - 1 ))
  _shtab_bypassctl
  [[ "${words[-1]}" == *: || " ${COMPREPLY[*]} " == *": "* ]] && compopt -o nospace 2>/dev/null
  local at
  for at in "${!COMPREPLY[@]}"; do COMPREPLY[at]="${COMPREPLY[at]:colons}"; done
}
"""
_ZSH: Final = r"""
_bypassctl_names() {
  local -a names
  names=(${(f)"$(command bypassctl __complete "$1" "$PREFIX" "${words[@]}" 2>/dev/null </dev/null)"})
  (( $#names )) && compadd -a names
}

_bypassctl_keys() { compadd -a _bypassctl_settings }
"""


_FISH: Final = r"""
# Tokens are divided here and not expanded. The word of --pod=NAME is NAME.
function _bypassctl_names
  set -l word (commandline -ct)
  set word (string replace -r -- '^--[a-z-]+=' '' "$word")
  command bypassctl __complete $argv[1] "$word" (commandline -opc) 2>/dev/null </dev/null
end

function _bypassctl_keys
  printf '%s\n' $_bypassctl_settings
end
"""


def completion(shell: str) -> str:
    import shtab  # a tool of development

    from reconciler.cli.main import parser

    if shell == "fish":
        functions = "\n".join(f"function _bypassctl_{kind}; _bypassctl_names {kind}; end" for kind in KINDS)
        before = f"set -g _bypassctl_settings {' '.join(_keys())}\n{_FISH}{functions}\n"
    else:
        functions = "\n".join(f'_bypassctl_{kind}() {{ _bypassctl_names {kind} "$1"; }}' for kind in KINDS)
        array = f"_bypassctl_settings=({' '.join(_keys())})\n"
        before = f"{array}{_BASH if shell == 'bash' else _ZSH}{functions}\n"
    text: str = shtab.complete(parser(), shell=shell, preamble=before)
    assert shell != "bash" or text.count(_REGISTERED) == 1
    text = text.replace(_REGISTERED, _REGISTERED.replace("_shtab_bypassctl", "_bypassctl"))
    lines = (line.rstrip() for line in text.splitlines())
    return "\n".join(lines) + "\n"


def _keys() -> list[str]:
    from reconciler.config.model import Config
    from reconciler.settings.schema import section_of, settings

    return sorted(path for path, _ in settings(section_of(Config)))


SECTIONS: Final = (
    *("agent", "pools", "budget", "directories", "pods", "settings", "files", "holds", "history", "sources"),
    *("headroom", "sides", "alerts", "interference", "eviction", "owners", "problems"),
    *("classes", "podlist", "cpumap", "nodehour", "effect", "podnames", "podparents", "hostlist"),
)
"""Sections and views of `reconciler.daemon.status`, which a start of the completion has no time to import."""
_SAFE: Final = re.compile(r"[A-Za-z0-9_./][A-Za-z0-9_./:-]{0,319}")
"""Names that are printed: their authors choose them, and a shell may expand other characters."""
_MOST: Final = 500
_LONGEST_WORDS: Final = 200
_ANSWER_S: Final = 0.7
_ALL_S: Final = 1.0
_PLACES: Final = {"--socket": "socket", "--config": "config", "--store": "store", "--root": "root"}
_NAMESPACE: Final = ("-n", "--namespace")


def run(arguments: Sequence[str]) -> int:
    """Print the names that begin with PREFIX; the WORDs are the command line so far. Always 0."""
    kind, prefix, *words = [*arguments, "", ""][: 2 + _LONGEST_WORDS]
    if kind not in KINDS:
        return 0
    # The shell waits: a late answer is none, whatever the program is waiting for.
    before = signal.signal(signal.SIGALRM, lambda *_: os._exit(0))
    signal.setitimer(signal.ITIMER_REAL, _ALL_S)
    try:
        options, namespace = _read(words)
        names = _FINDERS[kind](_Words(options, prefix, namespace))
        found = sorted({name for name in names if name.startswith(prefix) and _SAFE.fullmatch(name)})[:_MOST]
    except (AgentError, OSError, ValueError, KeyError, TypeError, AttributeError):
        # No daemon, no right to ask it, another answer: a message would be in the middle of the typed line.
        found = []
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    streams.write("".join(f"{name}\n" for name in found))
    return 0


def _read(words: Sequence[str]) -> tuple[Namespace, str | None]:
    """The options that say where the daemon is, and the namespace, of an unfinished command line."""
    options = Namespace(socket=None, config=None, store=None, root="/")
    namespace = None
    for word, following in zip(words, [*words[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        value = value if equals else following
        if name in _PLACES and value:
            setattr(options, _PLACES[name], value)
        elif name in _NAMESPACE and value:
            namespace = value
    return options, namespace


class _Words(NamedTuple):
    """What is typed so far: the options with the places, the begin of the name, the namespace."""

    options: Namespace
    prefix: str
    namespace: str | None


def _ask(words: _Words, sections: str) -> Row:
    return get(places.find(words.options), f"/state?section={sections}", timeout_s=_ANSWER_S)


def _named(words: _Words) -> Iterator[Row]:
    return (row for row in _ask(words, "podnames")["podnames"] if row["name"])


def _pods(words: _Words) -> Iterator[str]:
    for row in _named(words):
        # Without a namespace and a begin, a name alone would be printed beside the same one with its namespace.
        if row["namespace"] == words.namespace or (words.namespace is None and words.prefix):
            yield row["name"]
        if words.namespace is None:
            yield f"{row['namespace']}/{row['name']}"


def _workloads(words: _Words) -> Iterator[str]:
    """Pods, and what is watched beside them."""
    if words.namespace is None and (words.prefix.startswith("host:") or "host:".startswith(words.prefix)):
        yield from (f"host:{row['name']}" for row in _ask(words, "hostlist")["hostlist"])
    if not words.prefix.startswith("host:"):
        yield from _pods(words)


def _held(words: _Words) -> Iterator[str]:
    """What can be held."""
    yield "node"
    if words.prefix.startswith("knob:"):
        from cgroupfs.knobs import CATALOG  # only for these

        yield from (f"knob:{name}" for name in CATALOG)
    elif words.prefix.startswith("pod:"):
        yield from (f"pod:{name}" for name in _pods(words._replace(prefix=words.prefix.removeprefix("pod:"))))
    else:
        yield from ("pod:", "knob:")


def _holds(words: _Words) -> Iterator[str]:
    """The present holds, as `holds` prints them."""
    from reconciler.cli.targets import titled

    holds = titled(_ask(words, "holds,podnames"))
    yield from (hold["title"] for hold in holds if of_namespace(hold["pod"], words.namespace))


def _pools(words: _Words) -> Iterator[str]:
    return (name for name in _ask(words, "pools")["pools"] if not name.startswith("dedicated/"))


_FINDERS: Final[Mapping[str, Callable[[_Words], Iterable[str]]]] = {
    "pods": _pods,
    "workloads": _workloads,
    "held": _held,
    "holds": _holds,
    "namespaces": lambda words: (row["namespace"] for row in _named(words)),
    "pools": _pools,
    "sections": lambda _: SECTIONS,
}
KINDS: Final = tuple(_FINDERS)


def main() -> None:
    """Write the files below the current directory."""
    for shell, path in FILES.items():
        with open(path, "w", encoding="utf-8") as file:
            file.write(completion(shell))


if __name__ == "__main__":
    main()
