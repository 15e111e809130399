import shutil
import subprocess
from pathlib import Path

import pytest

from tests.virtual import __main__ as program
from tests.virtual import machine
from tests.virtual.machine import LAWS, SHORT, Run, agent_groups
from tests.virtual.report import BenchError


def run_of(*parts: str) -> Run:
    return program.run_of(program.options().parse_args(parts))


def test_the_short_form_has_four_laws_on_the_older_kernel() -> None:
    assert run_of("--short") == Run(laws=SHORT, suite="bullseye")
    assert run_of() == Run(laws=LAWS)


def test_arguments_reach_the_run() -> None:
    given = run_of(
        "--laws", "kubernetes,cpu", "--be", "burstable", "--agent", "a.slice:50/b", "--kubelet", "--trace", "3"
    )
    assert given == Run(
        laws=("kubernetes", "cpu"), be_qos="burstable", agent_group="a.slice:50/b", kubelet_like=True, longest=3
    )


@pytest.mark.parametrize(
    "parts",
    [
        ("--laws", "cpu,none"),
        ("--spinners", "0"),
        ("--agent", "a:1"),
        ("--agent", "../a"),
        ("--seconds", "0"),
        ("--laws", "daemons"),
        ("--daemon-shares", "50"),
        ("--kubelet", "--daemon-shares=1"),
        ("--kubelet", "--daemon-shares=a"),
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
    text = Run(laws=("alone", "cpu"), agent_group="a:50/b").parameters()
    printed = subprocess.run(
        ["bash", "-uc", f'{text}echo "$laws|$agent_group|$agent_shares|$kubelet_like|$longest"'],
        check=True,
        capture_output=True,
        text=True,
    )
    assert printed.stdout == "alone cpu|a/b|a=50 b=||0\n"


def test_a_host_without_the_tools_skips_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "mmdebstrap" else f"/usr/bin/{name}")
    assert program.main(["--short"]) == 0
    assert "skipped: missing: mmdebstrap (apt-get install" in capsys.readouterr().err


def test_without_a_tarball_the_command_that_makes_it_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("BYPASSD_ARTIFACT", raising=False)
    monkeypatch.setattr(machine, "REPOSITORY", tmp_path)
    with pytest.raises(BenchError, match="make artifact"):
        machine.artifact()
