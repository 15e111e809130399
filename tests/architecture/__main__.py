"""``python -m tests.architecture``: what docs/architecture.md shows of the structure.

ways    the product files that each scene enters, in their order (needs root and cgroup v1 for the first)
"""

import argparse
import os
import tempfile

from tests.architecture import drawing
from tests.architecture.entered import report
from tests.architecture.scenes import EVICTION_FILES, FOREIGN_CPUSET_FILES, eviction, foreign_cpuset


def _ways() -> None:
    with tempfile.TemporaryDirectory() as directory:
        if os.geteuid() == 0:
            files = foreign_cpuset(f"{directory}/foreign")
            print(report("a foreign CPU set, from the kernel's event to our write", files, FOREIGN_CPUSET_FILES))
        files = eviction(f"{directory}/eviction")
        print(report("an eviction, from the signal's reading to the order", files, EVICTION_FILES))


def _draw() -> None:
    drawing.SVG.write_text(drawing.draw(), encoding="utf-8")


def main() -> None:
    """Run one of the commands."""
    parser = argparse.ArgumentParser(prog="python -m tests.architecture")
    parser.add_argument("command", choices=("ways", "draw"))
    {"ways": _ways, "draw": _draw}[parser.parse_args().command]()


main()
