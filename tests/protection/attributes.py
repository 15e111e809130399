"""What attributes of BE processes that are inherited over fork and exec do for an online server, each alone.

    python -m tests.protection.attributes [--only io,slack] [--rounds 3] [--record FILE]

``io``: ioprio's idle class (ionice), beside buffered writers and, where fio is installed, direct random writes; online
is redis with a log that it syncs at each write. ``slack``: a timer slack of 50 ms beside processes that sleep 100 us at
a time; online is redis. Rounds are interleaved. BE pods are BestEffort, no agent runs.
"""

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from tests.protection.cells import stage
from tests.protection.hogs import CPUS, HOGS, Hog
from tests.protection.laws import LAWS
from tests.protection.services import SERVICES, Service

_SLACK: Final = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(29, 50000000, 0, 0, 0); os.execvp(sys.argv[1], sys.argv[1:])"
)
_NAPS: Final = "import time\nfor _ in range(5000): time.sleep(0.0001)"
_FIO: Final = (
    "--rw=randwrite --bs=64k --size=128M --direct=1 --ioengine=libaio --iodepth=32 --number_ios=500 --output=/dev/null"
)


class Set(Hog):
    """The same work with an attribute, set before its program is executed."""

    __slots__ = ()
    before: Sequence[str] = ()

    def command(self, program: str, directory: str, cpus: int = CPUS) -> list[str]:
        return [*self.before, *super().command(program, directory, cpus)]


class Idle(Set):
    """In ioprio's idle class."""

    __slots__ = ()
    before = ("/usr/bin/ionice", "-c3")


class Slack(Set):
    """With a timer slack of 50 ms."""

    __slots__ = ()
    before = ("/usr/bin/python3", "-c", _SLACK)


def _log(directory: str, port: int) -> list[str]:
    durable = ["--appendonly", "yes", "--appendfsync", "always", "--dir", directory]
    return ["/usr/bin/redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", *durable]


NAPS: Final = Hog("naps", "run", 8, lambda _: ["python3", "-c", _NAPS])
FIO: Final = Hog("fio", "run", 1, lambda directory: ["fio", "--name=be", f"--directory={directory}", *_FIO.split()])
CASES: Final = {
    "io": (
        Service("redis, synced", "redis", "-", "/usr/bin/redis-server", 16, _log),
        400.0,
        (HOGS["writes"], FIO),
        Idle,
    ),
    "slack": (SERVICES["redis"], 8000.0, (NAPS,), Slack),
}


def rows(name: str, rounds: int) -> Iterator[dict[str, Any]]:
    """A row for each cell."""
    service, rate, hogs, kind = CASES[name]
    with tempfile.TemporaryDirectory(prefix="bypassd-attributes-", dir="/var/tmp") as directory:
        Path(directory).chmod(0o755)
        with stage(service, directory) as place:
            for number in range(rounds):
                variants = [
                    (hog, way)
                    for hog in hogs
                    if shutil.which(hog.words(directory)[0]) or hog.kind != "run"
                    for way in (hog, kind(*hog))
                ]
                for hog, way in [(None, None), *variants]:
                    law = LAWS["alone" if way is None else "kubernetes"]
                    cell = place.cell(way, law, share=0.3, rate=rate, seconds=2.5, settle_s=1.0, number=number)
                    text = "-" if hog is None else hog.name
                    yield {
                        "of": name,
                        "be": text,
                        "set": isinstance(way, Set),
                        "p99": cell.p99,
                        "p999": cell.p999,
                        "work": cell.work,
                    }


def table(known: Sequence[dict[str, Any]]) -> str:
    """Medians."""
    lines = ["| of | BE work | set | p99 | p99.9 | BE work a second |", "|---|---|---|---:|---:|---:|"]
    for key in dict.fromkeys((row["of"], row["be"], row["set"]) for row in known):
        some = [row for row in known if (row["of"], row["be"], row["set"]) == key]
        p99, p999, work = (statistics.median(row[field] for row in some) for field in ("p99", "p999", "work"))
        lines.append(
            f"| {key[0]} | {key[1]} | {'yes' if key[2] else 'no'} | {p99:.0f} us | {p999:.0f} us | {work:.1f} |"
        )
    return "\n".join(lines)


def main() -> int:
    """Measure, and write the table of the whole record to standard output."""
    options = argparse.ArgumentParser(description="Inherited attributes of BE processes, each alone.")
    options.add_argument("--only", default=",".join(CASES))
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--record", type=Path, default=Path("attributes.jsonl"))
    given = options.parse_args()
    with given.record.open("a") as record:
        for name in given.only.split(","):
            for row in rows(name, given.rounds):
                record.write(json.dumps(row) + "\n")
                record.flush()
                print(row, file=sys.stderr)
    print(table([json.loads(line) for line in given.record.read_text().splitlines()]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
