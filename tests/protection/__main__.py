"""`make protection`: real services beside BE work under each law; the record, the tables and the pictures.

    python -m tests.protection [--services redis,nginx] [--hogs "int 2x,stream"] [--laws kubernetes,cpu]
        [--shares 0.3,0.6] [--rounds 1] [--whole] [--seconds 2] [--settle 2] [--agent-settle 6]
        [--client apart|beside] [--record FILE] [--pictures DIRECTORY] [--report]

By default four kinds of BE work at one load, a quarter of an hour. With ``--report`` the laws of the record are shown.
Needs root, cgroup v1 or v2, and Debian's redis-server, nginx, postgresql and nodejs; what is not installed is left out,
which is said. Nothing else should run on the machine; its use by others is in each figure's ``busy``.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.protection import hogs, laws
from tests.protection.cells import AGENT_SETTLE_S, encoded, measured, stage
from tests.protection.hogs import HOGS
from tests.protection.pictures import heat_map, plane
from tests.protection.report import outcomes, read_record, tables
from tests.protection.services import SERVICES, installed


def main(parts: Sequence[str] | None = None) -> int:
    """Measure, and write the tables to standard output."""
    options = argparse.ArgumentParser(description="Online latency and BE work under each law.")
    options.add_argument("--services", default=",".join(SERVICES))
    options.add_argument("--hogs")
    options.add_argument("--laws")
    options.add_argument("--shares")
    options.add_argument("--rounds", type=int)
    options.add_argument(
        "--whole", action="store_true", help="what is not given: every kind, law and load, three rounds"
    )
    options.add_argument("--seconds", type=float, default=2.0)
    options.add_argument("--settle", type=float, default=2.0)
    options.add_argument(
        "--agent-settle", type=float, default=AGENT_SETTLE_S, help="seconds from the agent's start to the first cell"
    )
    options.add_argument("--client", choices=("apart", "beside"), default="apart", help="a CPU of its own, or all")
    options.add_argument("--record", type=Path, default=Path("protection.jsonl"))
    options.add_argument(
        "--pictures", type=Path, help="write protection-heat.svg and protection-plane.svg into this directory"
    )
    options.add_argument("--report", action="store_true", help="only from the record: measure nothing")
    given = options.parse_args(parts)
    given.hogs = given.hogs or ",".join(HOGS if given.whole else hogs.USUAL)
    given.laws = given.laws or ",".join(laws.LAWS if given.report else laws.WHOLE if given.whole else laws.USUAL)
    given.shares = given.shares or ("0.3,0.6" if given.whole else "0.3")
    given.rounds = given.rounds or (3 if given.whole else 1)
    if not given.report:
        _measure(given)
    shown = {"alone", *given.laws.split(",")}
    rows = [row for row in read_record(given.record) if row.get("law", "alone") in shown]
    if given.pictures is not None:
        known = outcomes(rows)
        given.pictures.mkdir(parents=True, exist_ok=True)
        (given.pictures / "protection-heat.svg").write_text(heat_map(known))
        (given.pictures / "protection-plane.svg").write_text(plane(known))
    print(tables(rows))
    return 0


def _measure(given: argparse.Namespace) -> None:
    with given.record.open("ab") as record, tempfile.TemporaryDirectory(prefix="bypassd-protection-") as directory:
        Path(directory).chmod(0o755)
        for service in installed(given.services):
            with stage(service, directory, apart=given.client == "apart") as place:
                for cell in measured(
                    place,
                    shares=[float(text) for text in given.shares.split(",")],
                    hogs=[HOGS[name] for name in given.hogs.split(",")],
                    laws=[laws.LAWS[name] for name in given.laws.split(",")],
                    rounds=given.rounds,
                    seconds=given.seconds,
                    settle_s=given.settle,
                    agent_settle_s=given.agent_settle,
                    say=lambda text: print(text, file=sys.stderr),
                ):
                    record.write(encoded(cell))
                    record.flush()


if __name__ == "__main__":
    sys.exit(main())
