"""The classes of an earlier run, as the store's rows have them."""

from pathlib import Path

import pytest

from reconciler.control.persistence import POD, encoded, read_classes
from state.model import LastClass, PodClass
from state.schema import ASSIGNMENTS
from state.store import Store, StoreBatch

BE = LastClass(pod_class=PodClass.RECLAIMED, source="label x=BE")


@pytest.mark.parametrize(
    ("row", "last"),
    [
        (
            {
                "class": "shared",
                "class_source": "override: a",
                "last_class": "reclaimed",
                "last_class_source": BE.source,
            },
            BE,
        ),
        ({"class": "shared", "class_source": "kubernetes QoS", "class_certain": False, "last_class": None}, None),
        # Of the version before.
        ({"class": "reclaimed", "class_source": BE.source}, BE),
        ({"class": "shared", "class_source": "kubernetes QoS: Burstable"}, None),
        ({"class": "fast", "class_source": "x"}, None),
        ({"class_source": 5}, None),
    ],
)
def test_the_last_class_of_a_row(tmp_path: Path, row: dict[str, object], last: LastClass | None) -> None:
    store = Store(str(tmp_path / "state.db"), boot="b", version="1", node="n", history_limit=100)
    batch = StoreBatch()
    batch.put(ASSIGNMENTS, f"{POD}u", encoded(row))
    batch.put(ASSIGNMENTS, f"{POD}broken", b"\xc1")
    store.apply(batch)
    assert read_classes(store) == ({} if last is None else {"u": last})
    store.close()
