"""bypassctl owners: from a daemon, while the ledger is off, and without a daemon."""

import json
from typing import Any

from reconciler.cli.exits import Exit
from tests.reconciler.cli.conftest import Run
from tests.reconciler.cli.fakedaemon import FakeDaemon

ACCOUNT = {
    "owner": "ci",
    "sold_s": 120.4,
    "taken_back_s": 30.0,
    "lost_s": 5.0,
    "fair_s": 200.0,
    "debt_s": 79.6,
    "counts_percent": 125,
}
OWNERS: dict[str, Any] = {
    "label": None,
    "fair_shares": True,
    "fair_hours": 4,
    "windows": [
        {"hours": 1, "owners": [ACCOUNT]},
        {"hours": 24, "owners": [ACCOUNT, {**ACCOUNT, "owner": "batch", "debt_s": -79.6, "counts_percent": 100}]},
    ],
}


def test_each_window_has_a_row_for_each_owner_and_it_is_one_document_for_programs(ctl: Run, daemon: FakeDaemon) -> None:
    daemon.document["owners"] = OWNERS
    ran = ctl("owners")
    assert ran.code == Exit.OK
    rows = [line.split() for line in ran.out.splitlines()]
    assert rows.count(["ci", "120", "s", "30", "s", "5", "s", "200", "s", "80", "s", "125", "%"]) == 2
    assert ["batch", "120", "s", "30", "s", "5", "s", "200", "s", "-80", "s", "100", "%"] in rows
    assert json.loads(ctl("owners", "-o", "json").out) == {"owners": OWNERS}


def test_without_any_account_there_is_no_empty_table_and_while_it_is_off_none(ctl: Run, daemon: FakeDaemon) -> None:
    daemon.document["owners"] = {**OWNERS, "windows": [{"hours": hours, "owners": []} for hours in (1, 4, 24)]}
    ran = ctl("owners")
    assert (ran.code, len(ran.out.splitlines())) == (Exit.OK, 2)
    daemon.document["owners"] = {}
    assert ctl("owners").code == Exit.NOT_FOUND
