"""What makes alerts one incident, and its id."""

import pytest

from reconciler.alerts.alert import AlertKind, Severity
from reconciler.alerts.incident import Incidents, stamp
from tests.reconciler.alerts.making import alert


def test_tellings_of_one_kind_and_key_are_one_incident_until_its_end() -> None:
    incidents = Incidents(600)
    first = incidents.take(alert(kind=AlertKind.INTERFERENCE, labels={"pod": "a"}))
    second = incidents.take(alert(kind=AlertKind.INTERFERENCE, at_s=9000.0, labels={"pod": "b"}))
    end = incidents.take(alert(kind=AlertKind.CLEARED, at_s=9001.0))
    after = incidents.take(alert(kind=AlertKind.INTERFERENCE, at_s=9002.0))
    assert first.id == second.id == end.id != after.id
    assert (second.count, second.first_s, second.last_s, second.labels) == (2, 1000.0, 9000.0, {"pod": "a"})
    assert [incident.status for incident in (first, second, end, after)] == ["firing", "firing", "resolved", "firing"]


def test_an_event_that_was_quiet_for_long_is_another_one() -> None:
    incidents = Incidents(600)
    ids = [incidents.take(alert(at_s=at)).id for at in (0.0, 599.0, 1198.0, 1799.0)]
    assert len(set(ids[:3])) == 1
    assert ids[3] != ids[0]


def test_the_id_is_the_same_in_the_next_run_and_differs_by_kind_key_and_start() -> None:
    made = [Incidents(1).take(item).id for item in (alert(), alert(), alert("other"), alert(kind=AlertKind.STORE))]
    assert made[0] == made[1] == f"{made[0][:16]}-f4240"
    assert len({*made, Incidents(1).take(alert(at_s=1000.001)).id}) == 4


def test_the_very_same_telling_once_more_changes_nothing() -> None:
    incidents = Incidents(600)
    assert incidents.take(alert()) is incidents.take(alert())
    assert incidents.take(alert(severity=Severity.CRITICAL)).count == 2


def test_one_that_ended_and_began_within_a_millisecond_is_another_one() -> None:
    incidents = Incidents(600)
    ids = [incidents.take(alert(kind=AlertKind.STORE, resolved=over)).id for over in (False, True, False)]
    assert ids[0] == ids[1] != ids[2]


def test_only_so_many_are_remembered() -> None:
    incidents = Incidents(600, most=3)
    for key in "abcd":
        incidents.take(alert(key))
    assert (len(incidents), incidents.take(alert("a", at_s=1001.0)).count) == (3, 1)
    assert incidents.take(alert("d", at_s=1001.0)).count == 2


@pytest.mark.parametrize(
    ("at_s", "text"), [(0.0, "1970-01-01T00:00:00.000Z"), (1700000000.25, "2023-11-14T22:13:20.250Z")]
)
def test_times_are_written_as_rfc_3339(at_s: float, text: str) -> None:
    assert stamp(at_s) == text
