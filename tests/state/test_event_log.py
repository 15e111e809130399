"""Events of the ledger have numbers that continue over restarts, and none is lost without a count."""

from pathlib import Path

from state.entry import LedgerEvent
from state.event_log import RECENT, EventLog, missing
from state.ledger import Ledger
from state.store import Store


def event(kind: str = "plan") -> LedgerEvent:
    return LedgerEvent(at=1.0, kind=kind)


def opened(path: Path) -> Ledger:
    return Ledger(Store(str(path / "state.db"), boot="boot-1"))


def numbers(ledger: Ledger, after: int = 0) -> list[int]:
    return [item.number for item in ledger.events_after(after)]


def test_numbers_go_on_after_a_restart(tmp_path: Path) -> None:
    first = opened(tmp_path)
    for _ in range(3):
        first.note(event())
    first.flush()
    second = opened(tmp_path)
    second.note(event("mode"))
    assert numbers(second) == [1, 2, 3, 4]
    assert (second.events.first, second.events.last) == (4, 4)
    assert second.events.run != first.events.run


def test_events_that_a_crash_lost_give_their_numbers_to_the_next_run(tmp_path: Path) -> None:
    first = opened(tmp_path)
    first.note(event())
    first.flush()
    first.note(event("lost by the crash"))
    second = opened(tmp_path)
    second.note(event("mode"))
    assert [(item.number, item.kind) for item in second.events_after(1)] == [(2, "mode")]
    assert second.events.first == 2, "a reader of the first run goes on from here"


def test_the_memory_is_bounded_and_what_it_forgot_is_counted() -> None:
    log = EventLog()
    for _ in range(RECENT + 5):
        log.add(event())
    kept = log.after(0)
    assert len(kept) == RECENT
    assert missing(kept, 0) == 5
    assert missing(log.after(RECENT), RECENT) == 0


def test_a_row_without_a_number_or_that_cannot_be_read_is_left_out() -> None:
    assert EventLog([b"\xc1", b"\x80"]).last == 0


def test_the_title_is_that_of_the_time_of_the_event(tmp_path: Path) -> None:
    titles = {"u1": "shop/web-0"}
    ledger = Ledger(Store(str(tmp_path / "state.db")), title_of=lambda uid: titles.get(uid, ""))
    ledger.note(LedgerEvent(at=1.0, kind="off", pod_uid="u1"))
    titles.clear()
    assert [item.pod for item in ledger.events_after(0)] == ["shop/web-0"]
