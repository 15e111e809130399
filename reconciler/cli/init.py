"""``bypassctl init``: makes what an installation needs beside its programs. Each subject has a module of its own."""

from argparse import Namespace

from reconciler.cli.exits import Exit


def run(options: Namespace) -> int:
    """Make the subject that the command line names."""
    from reconciler.cli import credentials  # the only subject

    return Exit(credentials.run(options))
