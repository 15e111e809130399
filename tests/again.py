"""Tests that failed beside others run again, alone on the machine: what fails twice fails `make test`.

The parts of `make test` share the processors, so a daemon under test can miss a deadline that it keeps alone. Such
a test is to be mended, so the end of the run names it; whether the tree is sound is decided by its second run. More
than a handful of failures is no accident of scheduling, and fails at once.
"""

import sys
from pathlib import Path

import pytest

MOST = 5  # failures of one part


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--again", type=Path, metavar="FILE", help=f"the names of at most {MOST} failed tests, to run again"
    )


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Writes the names and ends with success. Another end (an interrupt, a usage error) stays as it is."""
    to: Path | None = session.config.option.again
    if to is None or exitstatus != pytest.ExitCode.TESTS_FAILED:
        return
    failed = _failed(session)
    if 0 < len(failed) <= MOST:
        to.write_text("".join(f"{name}\n" for name in failed))
        session.exitstatus = pytest.ExitCode.OK


def _failed(session: pytest.Session) -> list[str]:
    """Names of the tests that failed or whose fixtures did; none if a file could not be collected."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    reports = [report for kind in ("failed", "error") for report in reporter.stats.get(kind, [])] if reporter else []
    if not all(isinstance(report, pytest.TestReport) for report in reports):
        return []
    return list(dict.fromkeys(report.nodeid for report in reports))


def run(written: Path, arguments: list[str]) -> int:
    """Runs the tests named in the files of this directory alone. Returns pytest's exit code."""
    names = [name for file in sorted(written.iterdir()) for name in file.read_text().splitlines()]
    if not names:
        return 0
    print(f"\n{len(names)} tests failed beside others; each runs once more, alone:", *names, sep="\n  ", flush=True)
    code = pytest.main([*arguments, *names])
    if code == 0:
        print("Unsteady: these tests failed beside others and passed alone.", *names, sep="\n  ")
    return int(code)


if __name__ == "__main__":
    sys.exit(run(Path(sys.argv[1]), sys.argv[2:]))
