import re
import shutil
import subprocess
import time
from pathlib import Path

import msgspec
import pytest

from cgroupfs.codecs import shares_to_weight, weight_to_shares
from tests.virtual import __main__ as program
from tests.virtual import machine
from tests.virtual.machine import LAWS, SHORT, Run, agent_groups
from tests.virtual.report import BenchError, TooSlowError, UnavailableError
from tests.virtual.test_report import KUBERNETES, measured


def run_of(*parts: str) -> Run:
    return program.run_of(program.options().parse_args(parts))


def test_the_short_form_has_four_laws_on_the_older_kernel() -> None:
    assert run_of("--short") == Run(laws=SHORT, suite="bullseye")
    assert run_of("--ci") == run_of("--short")
    assert run_of() == Run(laws=LAWS)


def test_arguments_reach_the_run() -> None:
    given = run_of(
        *("--laws", "kubernetes,cpu", "--be", "burstable", "--agent", "a.slice:50/b", "--kubelet", "--trace", "3"),
        *("--cpus", "2", "--scheduler", "NO_HRTICK,HRTICK latency_ns=3000000"),
    )
    assert given == Run(
        laws=("kubernetes", "cpu"),
        be_qos="burstable",
        agent_group="a.slice:50/b",
        kubelet_like=True,
        longest=3,
        cpus=2,
        scheduler=("NO_HRTICK", "HRTICK latency_ns=3000000"),
    )


@pytest.mark.parametrize(
    "parts",
    [
        ("--laws", "cpu,none"),
        ("--spinners", "0"),
        ("--suite=trixie", "--cgroup=v1"),
        ("--touch-mib", "0"),
        ("--short", "--ci"),
        ("--agent", "a:1"),
        ("--agent", "../a"),
        ("--seconds", "0"),
        ("--laws", "daemons"),
        ("--laws", "start"),
        ("--daemon-shares", "50"),
        ("--kubelet", "--daemon-shares=1"),
        ("--kubelet", "--daemon-shares=a"),
        ("--scheduler", "$(reboot)"),
        ("--cpus", "0"),
        ("--starts", "-1"),
    ],
)
def test_arguments_out_of_bounds_end_with_the_usage(parts: tuple[str, str]) -> None:
    with pytest.raises(SystemExit) as end:
        program.main(parts)
    assert end.value.code == 2


def test_each_law_can_be_measured_under_several_weights_of_the_daemons() -> None:
    given = run_of("--laws", "alone,daemons", "--kubelet", "--daemon-shares", "1024,50")
    assert given == Run(laws=("alone", "daemons"), kubelet_like=True, daemon_shares=(1024, 50))
    assert "daemon_shares='1024 50'\n" in given.parameters()


def test_shares_belong_to_each_part_of_the_agents_group() -> None:
    assert agent_groups("bypassd.slice:50/bypassd.service") == (
        "bypassd.slice/bypassd.service",
        "bypassd.slice=50 bypassd.service=",
    )


def test_the_machine_reads_its_parameters_as_shell_variables() -> None:
    text = Run(laws=("alone", "cpu"), agent_group="a:50/b", starts_ms=500).parameters()
    printed = subprocess.run(
        ["bash", "-uc", f'{text}echo "$laws|$agent_group|$agent_shares|$kubelet_like|$starts_ms|$longest"'],
        check=True,
        capture_output=True,
        text=True,
    )
    assert printed.stdout == "alone cpu|a/b|a=50 b=||500|0\n"


def test_the_newest_kernel_is_measured_on_cgroup_v2_and_the_others_on_v1_unless_another_is_asked_for() -> None:
    assert [run_of("--suite", suite).cgroup_version() for suite in ("bullseye", "bookworm", "trixie")] == [
        *("v1", "v1", "v2")
    ]
    assert "cgroup=v2\n" in run_of("--suite", "bookworm", "--cgroup", "v2").parameters()


def test_the_be_pods_work_is_a_command_of_the_program_work() -> None:
    assert "be_work='spin 24'\n" in run_of("--spinners", "24").parameters()
    assert "be_work='touch 2 64'\n" in run_of("--work", "touch", "--touch-mib", "64").parameters()


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("gcc") is None:
        pytest.skip("NOT RUN: gcc is missing")
    program = tmp_path_factory.mktemp("virtual") / "work"
    source = machine.HERE / "work.c"
    subprocess.run(["gcc", "-O2", "-Wall", "-Wextra", "-Werror", "-o", program, source], check=True)
    return program


def faults_and_peak(process: subprocess.Popen[bytes]) -> tuple[int, int]:
    """Minor faults so far, and the largest memory of the process in KiB."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()
    peak = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{process.pid}/status").read_text())
    return int(fields[7]), int(peak[1]) if peak is not None else 0


def test_memory_touching_work_keeps_its_array_and_allocates_and_frees_without_an_end(work: Path) -> None:
    seen: list[int] = []
    with subprocess.Popen([work, "touch", "1", "16"]) as process:
        try:
            until = time.monotonic() + 30
            while time.monotonic() < until and len(seen) < 3:
                time.sleep(0.05)
                faults, peak = faults_and_peak(process)
                if peak > 16 * 1024 and faults not in seen:
                    seen.append(faults)
        finally:
            process.kill()
    # The array and one part of it are there, and faults happen nevertheless.
    assert len(seen) == 3
    assert peak < 2 * 16 * 1024


def test_a_spinner_has_no_memory_and_does_not_enter_the_kernel(work: Path) -> None:
    with subprocess.Popen([work, "spin", "1"]) as process:
        try:
            time.sleep(0.3)
            before, _ = faults_and_peak(process)
            time.sleep(0.3)
            after, peak = faults_and_peak(process)
        finally:
            process.kill()
    assert (after - before, peak < 4 * 1024) == (0, True)


def function_of(script: str, name: str) -> str:
    begin = script.index(f"\n{name}() {{\n")
    return script[begin : script.index("\n}\n", begin) + 3]


@pytest.mark.parametrize("shares", [2, 50, 114, 1024, 8192, 262144])
def test_the_machines_weights_on_cgroup_v2_are_the_kubelets(tmp_path: Path, shares: int) -> None:
    text = (machine.HERE / "inside.sh").read_text()
    code = "".join(function_of(text, name) for name in ("share_line", "shares_of"))
    (tmp_path / "pod").mkdir()
    printed = subprocess.run(
        ["bash", "-euc", f'{code}\ncgroup=v2 cgroups={tmp_path}\neval "$(share_line pod {shares})"\nshares_of pod'],
        check=True,
        capture_output=True,
        text=True,
    )
    weight = shares_to_weight(shares)
    assert (tmp_path / "pod/cpu.weight").read_text() == f"{weight}\n"
    assert printed.stdout == f"{weight_to_shares(weight)}\n"


def test_a_host_without_the_tools_skips_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "mmdebstrap" else f"/usr/bin/{name}")
    assert program.main(["--short"]) == 0
    assert "skipped: missing: mmdebstrap (apt-get install" in capsys.readouterr().err


def test_without_a_tarball_the_command_that_makes_it_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("BYPASSD_ARTIFACT", raising=False)
    monkeypatch.setattr(machine, "REPOSITORY", tmp_path)
    with pytest.raises(UnavailableError, match="make artifact"):
        machine.artifact()


def a_boot(monkeypatch: pytest.MonkeyPatch, ending: str | BenchError) -> None:
    def boot(run: Run, *, tarball: Path, limit_s: float) -> str:
        if isinstance(ending, BenchError):
            raise ending
        return ending

    monkeypatch.setattr(program, "missing", lambda: None)
    monkeypatch.setattr(program, "artifact", lambda: Path("tarball"))
    monkeypatch.setattr(program, "boot", boot)


@pytest.mark.parametrize(
    ("parts", "ending", "code"),
    [
        (["--ci"], UnavailableError("dist/ has no tarball: make artifact"), 0),
        (["--short"], UnavailableError("dist/ has no tarball: make artifact"), 1),
        (["--ci"], TooSlowError("the machine ran longer than 900 s"), 0),
        (["--short"], TooSlowError("the machine ran longer than 900 s"), 1),
        (["--ci"], BenchError("not a law's result"), 1),
    ],
)
def test_ci_skips_what_this_host_cannot_measure_with_the_reason_and_fails_for_anything_else(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    parts: list[str],
    ending: BenchError,
    code: int,
) -> None:
    a_boot(monkeypatch, ending)
    assert program.main([*parts, "--record", str(tmp_path / "record")]) == code
    said = capsys.readouterr().err
    assert (str(ending) in said, "skipped" in said) == (True, code == 0)


@pytest.mark.parametrize(
    ("parts", "p99_us", "code"),
    [(["--ci"], 1200, 0), (["--short"], 1200, 1), (["--ci"], 3000, 1)],
)
def test_ci_has_bounds_with_a_margin_and_fails_beyond_them(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    parts: list[str],
    p99_us: float,
    code: int,
) -> None:
    lines = [msgspec.json.encode(one).decode() for one in (KUBERNETES, measured("cpu", p99_us=p99_us))]
    a_boot(monkeypatch, "\n".join([*lines, '{"end": true}']))
    assert program.main([*parts, "--record", str(tmp_path / "record")]) == code
    assert ("missed: cpu: p99" in capsys.readouterr().out) == bool(code)
    assert len((tmp_path / "record").read_text().splitlines()) == 2


@pytest.mark.parametrize(("parts", "boots"), [([], 2), (["--trace", "2"], 1), (["--ci"], 1)])
def test_a_missed_bound_prints_what_ran_during_the_longest_requests(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    parts: list[str],
    boots: int,
) -> None:
    runs: list[Run] = []

    def boot(run: Run, *, tarball: Path, limit_s: float) -> str:
        runs.append(run)
        lines = [msgspec.json.encode(KUBERNETES).decode()] if "kubernetes" in run.laws else []
        lines.append(msgspec.json.encode(measured("cpu", p99_us=9000)).decode())
        lines += ["trace   bypassd-1 [000] 1.5: sched_switch"] if run.longest else []
        return "\n".join([*lines, '{"end": true}'])

    a_boot(monkeypatch, "")
    monkeypatch.setattr(program, "boot", boot)
    assert program.main([*parts, "--record", str(tmp_path / "record")]) == 1
    assert len(runs) == boots
    assert ("bypassd-1 [000] 1.5: sched_switch" in capsys.readouterr().out) == (parts != ["--ci"])
    if boots == 2:
        assert (runs[1].laws, runs[1].longest) == (("cpu",), 3)


def test_a_trace_that_was_asked_for_is_printed_of_every_law(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    lines = [msgspec.json.encode(KUBERNETES).decode(), "trace   redis-1 [000] 1.5: sched_switch", '{"end": true}']
    a_boot(monkeypatch, "\n".join(lines))
    assert program.main(["--laws", "kubernetes", "--trace", "2", "--record", str(tmp_path / "record")]) == 0
    assert "redis-1 [000] 1.5: sched_switch" in capsys.readouterr().out


@pytest.mark.parametrize(("code", "error"), [(2, UnavailableError), (1, BenchError)])
def test_a_disk_for_which_the_mirror_is_missing_is_told_apart_from_a_broken_script(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: int, error: type[BenchError]
) -> None:
    (tmp_path / "build.sh").write_text(f"#!/bin/sh\necho reason >&2\nexit {code}\n")
    (tmp_path / "build.sh").chmod(0o755)
    monkeypatch.setattr(machine, "HERE", tmp_path)
    with pytest.raises(BenchError, match="reason") as raised:
        machine._image("bullseye")
    assert raised.type is error
