"""The program ``bypassctl`` (and ``state-dump``, which is ``bypassctl dump``).

Start-up is under 60 ms because a command's module is imported when the command is used, and the event loop, the HTTP
library and the models only by commands that act or look at the node themselves.
"""

import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from importlib import import_module

from cgroupfs.errors import AgentError, InputError
from reconciler.cli import output
from reconciler.cli.exits import CliError, Exit
from reconciler.cli.options import COMMANDS, parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; its exit code (`Exit`)."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    known = words and words[0] in {command.name for command in COMMANDS}
    return to_output(lambda: _command(parser(only=words[0] if known else None).parse_args(words)))


def to_output(run: Callable[[], int], program: str = "bypassctl") -> int:
    """Run a part of a program that writes to standard output; its exit code, or that of what went wrong."""
    with output.prepared():
        try:
            return _until_written(run, program)
        except output.OutputError as exc:
            output.give_up()
            if exc.code is not Exit.OK:
                output.complain(str(exc), program)
            return int(exc.code)
        except KeyboardInterrupt:
            return 130


def _until_written(run: Callable[[], int], program: str) -> int:
    try:
        code = run()
    except SystemExit as exc:
        # --help, --version, and what argparse refuses.
        code = int(exc.code or 0)
    except output.OutputError:
        raise
    except CliError as exc:
        code = _failed(str(exc), exc.code, program)
    except InputError as exc:
        code = _failed(str(exc), Exit.USAGE, program)
    except AgentError as exc:
        code = _failed(str(exc), Exit.REFUSED, program)
    output.finish()
    return code


def _command(options: Namespace) -> int:
    return int(import_module(f"reconciler.cli.{options.module}").run(options))


def _failed(text: str, code: Exit, program: str) -> int:
    # In the order in which it happened, where both go to one terminal.
    output.finish()
    output.complain(text, program)
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
