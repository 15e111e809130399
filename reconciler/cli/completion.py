"""Makes the shells' completion files in deploy/completion from the command line's own declaration.

``python -m reconciler.cli.completion`` (in the project's directory) writes them again; a test compares them.

Names of pods and holds are of `reconciler.cli.candidates`. The shells read them as lines and never expand them, and the
program is the one of the search path, never a file that is only named so.
"""

from typing import Final

import shtab

from reconciler.cli.candidates import KINDS
from reconciler.cli.main import parser
from reconciler.config.model import Config
from reconciler.settings.schema import section_of, settings

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
    """One shell's file."""
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
    """Every setting and section."""
    return sorted(path for path, _ in settings(section_of(Config)))


def main() -> None:
    """Write the files below the current directory."""
    for shell, path in FILES.items():
        with open(path, "w", encoding="utf-8") as file:
            file.write(completion(shell))


if __name__ == "__main__":
    main()
