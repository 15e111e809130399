"""``bypassctl init``: makes what an installation needs beside its programs. Each subject has a module of its own."""

from argparse import Namespace

from reconciler.cli.exits import Exit
from reconciler.cli.options import OWN_KUBECONFIG


def run(options: Namespace) -> int:
    """Make the subject that the command line names."""
    if options.subject == "config":
        from reconciler.cli import initial

        return Exit(initial.run(options))
    from reconciler.cli import credentials

    options.to = options.to or OWN_KUBECONFIG
    return Exit(credentials.run(options))
