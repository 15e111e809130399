"""Makes the shells' completion files in deploy/completion from the command line's own declaration.

``python -m reconciler.cli.completion`` (in the project's directory) writes them again; a test compares them.
"""

from typing import Final

import shtab

from reconciler.cli.options import parser

FILES: Final = {"bash": "deploy/completion/bypassctl.bash", "zsh": "deploy/completion/_bypassctl"}


def completion(shell: str) -> str:
    """One shell's file."""
    text: str = shtab.complete(parser(), shell=shell)
    lines = (line.rstrip() for line in text.splitlines())
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write both files below the current directory."""
    for shell, path in FILES.items():
        with open(path, "w", encoding="utf-8") as file:
            file.write(completion(shell))


if __name__ == "__main__":
    main()
