"""``python -m reconciler.cli``."""

from reconciler.cli.main import program

program()
