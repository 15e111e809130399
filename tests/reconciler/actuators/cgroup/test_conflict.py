from reconciler.actuators.cgroup.conflict import ConflictAction, ForeignWrites
from reconciler.actuators.cgroup.foreign_rules import ForeignRules
from tests.fakes.constants import varied

KEY = ("/kubepods/besteffort/podx/c", "cpu.set")
RULES = varied(
    ForeignRules(rounds=3, hold_person_s=300), window_s=120, backoff_s=1, backoff_max_s=30, retry_yielded_s=600
)


def ask(book: ForeignWrites, now: float, *, person: bool = False, expected: bool = False) -> ConflictAction:
    return book.decide(KEY, "someone", now, person=person, expected=expected).action


def test_the_first_foreign_write_is_corrected_at_once_and_the_next_wait_longer() -> None:
    book = ForeignWrites(RULES)
    assert ask(book, 0) is ConflictAction.REASSERT
    second = book.decide(KEY, "tuned", 1, person=False, expected=False)
    assert (second.action, second.check_at) == (ConflictAction.WAIT, 2)
    assert ask(book, 1.5) is ConflictAction.WAIT
    assert ask(book, 2) is ConflictAction.REASSERT
    third = book.decide(KEY, "tuned", 3, person=False, expected=False)
    assert (third.action, third.check_at) == (ConflictAction.WAIT, 5)


def test_after_the_rounds_of_one_window_the_file_is_left_to_the_other_writer() -> None:
    book = ForeignWrites(RULES)
    answers = [ask(book, 10.0 * tick, expected=True) for tick in range(4)]
    assert answers == [ConflictAction.REASSERT, ConflictAction.REASSERT, ConflictAction.REASSERT, ConflictAction.YIELD]
    assert book.state(KEY, 100) is ConflictAction.YIELD
    assert book.pending(100) == 630
    assert ask(book, 40) is ConflictAction.YIELD
    assert ask(book, 630) is ConflictAction.REASSERT
    assert ask(book, 640, expected=True) is ConflictAction.REASSERT


def test_rounds_outside_the_window_are_forgotten() -> None:
    book = ForeignWrites(RULES)
    assert {ask(book, 200.0 * tick, expected=True) for tick in range(20)} == {ConflictAction.REASSERT}


def test_a_persons_change_is_a_hold_and_not_reverted() -> None:
    book = ForeignWrites(RULES)
    verdict = book.decide(KEY, "bash (pid 7)", 10, person=True, expected=False)
    assert verdict.action is ConflictAction.HOLD
    assert "set manually by bash (pid 7)" in verdict.text
    assert verdict.check_at == 310
    again = book.decide(KEY, "bash (pid 7)", 310, person=True, expected=False, fresh=False)
    assert again.action is ConflictAction.REASSERT, "the hold is over: the value that stands is no new decision"
    assert book.decide(KEY, "bash (pid 7)", 320, person=True, expected=False).action is ConflictAction.HOLD


def test_after_a_hold_the_rounds_are_counted_from_the_first() -> None:
    book = ForeignWrites(varied(RULES, hold_person_s=60))
    assert [ask(book, 0), ask(book, 1, person=True)] == [ConflictAction.REASSERT, ConflictAction.HOLD]
    assert [ask(book, 61), ask(book, 62)] == [ConflictAction.REASSERT, ConflictAction.WAIT]


def test_a_value_that_could_not_be_set_again_at_once_is_no_further_write() -> None:
    book = ForeignWrites(RULES)
    assert ask(book, 0) is ConflictAction.REASSERT
    for now in range(1, 10):
        stands = book.decide(KEY, "tuned", now, person=False, expected=False, fresh=False)
        assert stands.action is ConflictAction.REASSERT
    assert ask(book, 11) is ConflictAction.WAIT, "the second write, not the eleventh"


def test_forgetting_a_group_ends_its_waits_and_leaves_others() -> None:
    book = ForeignWrites(RULES)
    other = ("/kubepods/besteffort/pody/c", "cpu.set")
    for now in (0, 1):
        ask(book, now)
        book.decide(other, "tuned", now, person=False, expected=False)
    book.forget(KEY[0])
    assert book.state(KEY, 1.5) is None
    assert book.state(other, 1.5) is ConflictAction.WAIT


def test_what_systemd_writes_again_is_corrected_at_once_each_time() -> None:
    """The kubelet's systemd driver resets the besteffort slice each minute and at each pod; `apt upgrade` all units."""
    book = ForeignWrites(varied(RULES, systemd_per_minute=4))
    times = [minute * 60.0 + second for minute in range(10) for second in (0, 1, 2, 3)]
    answers = [book.decide(KEY, "systemd", at, person=False, expected=False, reapplied=True).action for at in times]
    assert answers == [ConflictAction.REASSERT] * 40


def test_pods_that_come_and_go_faster_delay_the_correction_and_never_end_it() -> None:
    """A pod that starts and one that ends reset the slice: with 31 short pods a minute a tenant exceeds the limit."""
    book = ForeignWrites(varied(RULES, systemd_per_minute=4))
    corrections, now = [], 10.0
    while now < 310:
        answer = book.decide(KEY, "systemd", now, person=False, expected=False, reapplied=True)
        if answer.action is ConflictAction.WAIT:
            assert answer.check_at == now + RULES.backoff_s
            now = answer.check_at
            answer = book.decide(KEY, "systemd", now, person=False, expected=False, reapplied=True, fresh=False)
        assert answer.action is ConflictAction.REASSERT
        corrections.append(now)
        now += 0.5
    for minute in range(5):
        begin = 10 + 60 * minute
        count = sum(begin <= at < begin + 60 for at in corrections)
        assert 30 < count <= 4 + 60 / RULES.backoff_s


def test_another_writer_beside_systemd_is_still_given_up() -> None:
    book = ForeignWrites(varied(RULES, systemd_per_minute=0))
    answers = []
    for tick in range(4):
        now = 200.0 + 20 * tick
        assert book.decide(KEY, "systemd", now, person=False, expected=False, reapplied=True).action is (
            ConflictAction.WAIT
        )
        answers.append(ask(book, now + 5, expected=True))
        answers.append(ask(book, now + 10, expected=True))
    assert answers[-1] is ConflictAction.YIELD
