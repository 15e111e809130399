"""The program ``bypassctl`` (and ``state-dump``, which is ``bypassctl dump``).

Start-up is under 60 ms because a command's module is imported when the command is used, and the event loop, the HTTP
library and the models only by commands that act or look at the node themselves.
"""

import os
import sys
from collections.abc import Sequence
from importlib import import_module

from cgroupfs.errors import AgentError, InputError
from reconciler.cli.exits import CliError, Exit
from reconciler.cli.options import COMMANDS, parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; its exit code (`Exit`)."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    known = words and words[0] in {command.name for command in COMMANDS}
    options = parser(only=words[0] if known else None).parse_args(words)
    try:
        code = int(import_module(f"reconciler.cli.{options.module}").run(options))
        sys.stdout.flush()
    except CliError as exc:
        return _told(str(exc), exc.code)
    except InputError as exc:
        return _told(str(exc), Exit.USAGE)
    except AgentError as exc:
        return _told(str(exc), Exit.REFUSED)
    except BrokenPipeError:
        # The reader has seen enough (head, less). Python would complain when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130
    return code


def _told(words: str, code: Exit) -> int:
    sys.stdout.flush()
    print(f"bypassctl: {' '.join(words.split())}", file=sys.stderr)
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
