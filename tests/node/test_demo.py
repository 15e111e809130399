"""The demo's figures, words and verdicts; a whole run on the fake kernel."""

import glob
import os
import re
import tempfile

import pytest

from tests.node import report
from tests.node.__main__ import main
from tests.node.bypassd import Undoing, View, Wanted, numbers_of, view_of
from tests.node.client import SAMPLE, Sample, percentile, read_samples
from tests.node.demo import Measured, Outcome, changes_between
from tests.node.frame import Cell, Frame, Row, pools_of, pools_text, wanted_text
from tests.node.machine import busy_s
from tests.node.screen import line
from tests.node.simulated import LABEL
from tests.node.values import Difference
from tests.node.work import Counter, read_counter
from tests.node.workload import Latency, latency_of


@pytest.mark.parametrize(
    ("values", "share", "found"),
    [([], 0.5, None), ([3.0], 0.99, 3.0), ([4.0, 1.0, 3.0, 2.0], 0.5, 2.0), ([*map(float, range(1, 101))], 0.99, 99.0)],
)
def test_percentiles_are_the_nearest_rank(values: list[float], share: float, found: float | None) -> None:
    assert percentile(values, share) == found


def test_samples_are_read_on_from_where_the_last_reading_ended(tmp_path: object) -> None:
    path = f"{tmp_path}/samples"
    assert read_samples(path) == ([], 0)
    with open(path, "wb") as file:
        file.write(SAMPLE.pack(1.0, 0.003) + SAMPLE.pack(2.0, 0.004)[:5])
    first, offset = read_samples(path)
    assert first == [Sample(1.0, 0.003)]
    with open(path, "ab") as file:
        file.write(SAMPLE.pack(2.0, 0.004)[5:])
    assert read_samples(path, offset)[0] == [Sample(2.0, 0.004)]
    assert latency_of(first) == Latency(requests=1, p50=3.0, p99=3.0)


def test_work_is_the_sum_of_all_processes(tmp_path: object) -> None:
    path = f"{tmp_path}/work"
    assert read_counter(path) == 0
    counter = Counter(path, 2)
    counter.set(0, 5)
    counter.set(1, 7)
    assert read_counter(path) == 12


def _row(quota: Cell, weight: Cell) -> Row:
    return Row(
        title="batch/executor",
        pool="reclaimed",
        pod_class="reclaimed",
        source="label",
        qos="Burstable",
        cpus=Cell(actual="0-1"),
        quota=quota,
        weight=weight,
        progress="",
        online=False,
    )


def test_a_cell_shows_whether_what_is_wanted_is_there() -> None:
    assert [str(Cell(actual="0")), str(Cell(actual="0", wanted="0")), str(Cell(actual="0-1", wanted="0"))] == [
        "0",
        "0 ✓",
        "0-1 → 0",
    ]


@pytest.mark.parametrize(("wanted", "text"), [(10_000, "10%"), ("10000", "10%"), (-1, "none"), (None, "none")])
def test_wanted_quotas_are_shown_as_the_actual_ones_are(wanted: object, text: str) -> None:
    assert wanted_text(Wanted(knob="cpu.quota", wanted=wanted, state="", reason="")) == text


def _view(pools: dict[str, str]) -> View:
    document = {
        "agent": {"mode": "enforce"},
        "budget": {"budget_milli": 100, "reasons": {"shared/x": "asks for 1"}},
        "pools": pools,
        "pods": [],
        "settings": [],
        "files": [],
        "problems": [],
    }
    return view_of(document, {})


def test_pools_are_shown_by_their_pods_names_and_without_those_that_have_no_cpus() -> None:
    view = _view({"shared": "2", "reserved": "0", "reclaimed": "3", "dedicated/u1/main": "1", "system/dns": ""})
    pairs = pools_of(view, {"u1": "ledger"})
    assert pools_text(pairs) == "dedicated ledger 1, shared 2, reclaimed 3, reserved 0"
    assert pools_of(None, {}) == ()


def test_cpu_use_beside_the_pods_is_what_was_not_idle() -> None:
    # user nice system idle iowait irq softirq steal guest guest_nice, in ticks; guests are in user and nice already
    assert busy_s("cpu  100 10 50 9999 777 5 15 20 60 3\ncpu0 1 1\n") * os.sysconf("SC_CLK_TCK") == pytest.approx(200)


def test_a_machine_that_is_busy_beside_the_pods_is_reported() -> None:
    latency = Latency(requests=1, p50=1.0, p99=1.0)
    phases = tuple(
        Measured(name="a", seconds=1.0, latency=latency, be_rate=None, beside=beside) for beside in (0.1, 0.7)
    )
    text = "\n".join(report.lines(_outcome(phases=phases)))
    assert "DISTURBED: beside the pods this machine used 0.10 to 0.70 CPUs" in text
    assert "DISTURBED" not in "\n".join(report.lines(_outcome(phases=phases[:1])))


def test_changes_are_reported_as_text() -> None:
    before = _row(Cell(actual="none"), Cell(actual="512"))
    after = _row(Cell(actual="10%", wanted="10%"), Cell(actual="2", wanted="2"))
    assert list(changes_between([before], [after])) == ["batch/executor: quota none → 10%, weight 512 → 2"]
    assert list(changes_between([before], [before])) == []


def test_counters_are_read_by_their_last_label() -> None:
    text = (
        "# TYPE bypassd_writes_total counter\n"
        'bypassd_writes_total{knob="cpu.quota",outcome="ok"} 3.0\n'
        'bypassd_writes_total{knob="cpu.set",outcome="ok"} 2.0\n'
    )
    assert numbers_of(text) == {"bypassd_writes_total": {"ok": 5}}


def _outcome(**more: object) -> Outcome:
    known: dict[str, object] = {
        "phases": (Measured(name="online alone", seconds=1.0, latency=None, be_rate=None),),
        "starts": {"a": True, "b": False, "c": None},
        "signal_to_write_s": (0.0002, 0.0004),
        "knobs": {"cpu.quota": 2},
        "files": 2,
        "writes": 3,
        "foreign": {},
        "updates": 0,
        "refused": (),
        "undoing": Undoing(restored=2, left=()),
        "compared": 10,
        "differences": (),
        "changes": (),
    }
    return Outcome(**{**known, **more})  # type: ignore[arg-type]


def test_only_a_run_that_put_everything_back_is_good() -> None:
    assert report.good(_outcome())
    assert not report.good(_outcome(undoing=Undoing(restored=1, left=("/x/cpu.shares: refused",))))
    assert not report.good(_outcome(differences=(Difference("/x", "cpu.quota", "-1", "1000"),)))
    assert not report.good(_outcome(compared=0)), "a comparison of nothing proves nothing"


def test_the_report_names_what_differs_and_what_was_disturbed() -> None:
    outcome = _outcome(differences=(Difference("/x", "cpu.quota", "-1", "1000"),), refused=("web: no",))
    text = "\n".join(report.lines(outcome))
    assert "DIFFERENT FROM BEFORE: 1 of 10 values" in text
    assert "/x/cpu.quota: was '-1', is '1000'" in text
    assert "DISTURBED: 1" in text
    assert "restored: " not in text


def test_the_report_counts_starts_by_how_they_ended() -> None:
    phase = Measured(name="a", seconds=1.0, latency=Latency(requests=1, p50=1.0, p99=1.0), be_rate=None)
    text = "\n".join(report.lines(_outcome(phases=(phase,))))
    assert "before exec: 1 of 3 BE containers started under the agent (1 too late, 1 could not be told)" in text
    assert "median 0.20 ms, p99 0.40 ms of 2 starts" in text


def test_the_table_compares_phases_of_different_length() -> None:
    latency = Latency(requests=300, p50=1.0, p99=1.0)
    short, long = (Measured(name="a", seconds=seconds, latency=latency, be_rate=None) for seconds in (3.0, 30.0))
    assert [row[3] for row in report.rows((short, long))] == ["100", "10"]


def test_every_line_of_a_fake_kernels_run_says_so() -> None:
    frame = Frame(
        label=LABEL, node="", phase="p", step="", elapsed_s=1, left_s=1, rows=(), latency=None, be_rate=None,
        budget="", pools=(), agent=(),
    )  # fmt: skip
    assert line(frame).startswith(LABEL)


@pytest.mark.timeout(90)
def test_the_whole_demo_on_the_fake_kernel_bounds_and_puts_everything_back(capsys: pytest.CaptureFixture[str]) -> None:
    before = set(glob.glob(f"{tempfile.gettempdir()}/bypassd-fake-*"))
    code = main(["--node", "fake", "--seconds", "12", "--plain"])
    text = capsys.readouterr().out
    assert code == 0, text
    assert "weight 512 → idle" in text
    # The kubelet gave one pod CPU 1, another one's pool has one of the others.
    assert "dedicated ledger 1, shared 2, shared/search 3, reclaimed 3, reserved 0" in text
    assert re.search(r"^ shop/search +Burstable +shared/search +3 ✓ ", text, re.MULTILINE)
    assert "all as before the agent" in text
    shown = [row for row in text.splitlines() if row.startswith(LABEL)]
    assert len([row for row in shown if "agent enforcing" in row]) >= 1
    assert {name for name in glob.glob(f"{tempfile.gettempdir()}/bypassd-fake-*") if os.path.isdir(name)} <= before


def test_the_phases_are_compared_with_alone_and_be_work_with_what_it_was_without_the_agent() -> None:
    phases = tuple(
        Measured(name=name, seconds=1.0, latency=Latency(requests=1, p50=1.0, p99=p99), be_rate=rate)
        for name, p99, rate in (("alone", 4.0, None), ("without", 40.0, 200.0), ("with", 5.0, 190.0))
    )
    assert list(report.multiples(phases)) == [
        "online p99, multiples of alone: 10.0 (without), 1.2 (with)",
        "BE work with the agent: 95% of without",
    ]


@pytest.mark.parametrize("count", [0, 1])
def test_nothing_is_compared_with_what_was_not_measured(count: int) -> None:
    phase = Measured(name="alone", seconds=1.0, latency=Latency(requests=0, p50=0.0, p99=0.0), be_rate=None)
    fake = Measured(name="fake", seconds=1.0, latency=None, be_rate=None)
    assert not list(report.multiples(((phase, fake)[count], fake)))
