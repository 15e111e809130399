"""Records the harm law's inputs on a running node, for the law's tests: what a server waits, and what BE work uses.

    python -m tests.protection.trace --record FILE [--seconds 30]

redis beside arithmetic with twice as many threads as CPUs under the preset ``cpu``, so the law's own cuts are in it.
The load changes every fifth of the time. A line for each sample of a tenth of a second: seconds, running and waiting
(thousandths), how often a task began to run in a second, BE work's use (thousandths).
"""

import argparse
import json
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Final

from reconciler.signals.taskstats import Taskstats
from tests.protection.cells import Stage, stage
from tests.protection.hogs import HOGS
from tests.protection.laws import LAWS
from tests.protection.services import SERVICES, loaded, start_load

RATES: Final = (2_000.0, 14_000.0, 2_000.0, 8_000.0, 1_000.0)
_EVERY_S: Final = 0.1


def record(place: Stage, pid: int, seconds: float) -> list[list[float]]:
    rows: list[list[float]] = []
    cgroups = place.node.cgroups
    usage = Path(cgroups.directory("cpuacct", cgroups.group("kubepods", "besteffort")), "cpuacct.usage")
    tasks = Taskstats()
    began = time.monotonic()
    at, before, used = began, tasks.query([pid])[pid], int(usage.read_text())
    while at - began < seconds:
        time.sleep(_EVERY_S)
        now, delays, use = time.monotonic(), tasks.query([pid])[pid], int(usage.read_text())
        took = now - at
        rows.append(
            [
                round(now - began, 3),
                round((delays.run_ns - before.run_ns) / took / 1e6, 1),
                round((delays.wait_ns - before.wait_ns) / took / 1e6, 1),
                round((delays.switches - before.switches) / took),
                round((use - used) / took / 1e6),
            ]
        )
        at, before, used = now, delays, use
    tasks.close()
    return rows


def main() -> int:
    """Record, and write the file."""
    options = argparse.ArgumentParser(description="Record the harm law's inputs.")
    options.add_argument("--seconds", type=float, default=30.0)
    options.add_argument("--record", type=Path, required=True)
    given = options.parse_args()
    with tempfile.TemporaryDirectory(prefix="bypassd-trace-") as directory:
        Path(directory).chmod(0o755)
        with stage(SERVICES["redis"], directory) as place:
            place.rule(LAWS["cpu"], 0.0)
            groups = Path(place.pod["main"].directory("cpu"))
            pid = int((groups / "cgroup.procs").read_text().split()[0])
            with place.hog(HOGS["int 2x"], LAWS["cpu"]):
                time.sleep(2)

                def load() -> None:
                    for number, rate in enumerate(RATES):
                        each = given.seconds / len(RATES)
                        part = start_load(
                            place.generator, place.service, place.port, rate, warmup_s=0, seconds=each, seed=number
                        )
                        loaded(part)

                thread = threading.Thread(target=load)
                thread.start()
                rows = record(place, pid, given.seconds)
                thread.join()
    given.record.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{len(rows)} samples", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
