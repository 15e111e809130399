"""The store that a release leaves: ``python -m tests.state.release_store DIRECTORY`` writes this version's.

Each schema version has such a directory below tests/fixtures/store, made once by the last version of that schema; every
later version must open it (`tests.state.test_versions`). The contents are those of schema 2's (its README).
"""

import os
import sys
from typing import Any, Final

import msgpack
import msgspec

from reconciler.actuators.codec import RowCodec, write_rows
from reconciler.actuators.core_sched import tasks
from reconciler.actuators.core_sched.tasks import CookieState
from reconciler.actuators.files import node_files
from reconciler.actuators.files.node_files import FileRows, NodeFileState
from reconciler.actuators.network import actuator as network
from reconciler.actuators.network.actuator import NetworkState, Redirect, Redirects
from reconciler.actuators.processes import oom_score
from reconciler.actuators.processes.value_records import ContainerRecord, ContainerRecords
from reconciler.actuators.resctrl import undo as resctrl
from reconciler.actuators.resctrl.undo import ResctrlState
from state.entry import LedgerEntry, OriginalSource
from state.kinds import SYSCTL
from state.ledger import Ledger
from state.schema import HOLDS, META, RUNNING
from state.store import Store, StoreBatch

BOOT: Final = "4a9f2c1e-0000-4000-8000-0123456789ab"
POD: Final = "/kubepods/besteffort/pod11111111-1111-4111-8111-111111111111"
BOX: Final = f"{POD}/0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"
UID: Final = "11111111-1111-4111-8111-111111111111"
AT: Final = 1_700_000_000.0

KNOWN: Final[dict[RowCodec[Any], msgspec.Struct]] = {
    oom_score.CODEC: ContainerRecords(
        containers={
            BOX: ContainerRecord(
                pod_uid=UID, inode=41, ours=[900, 1000], original=100, odd={"812:55123": -999, "813:55124": 0}
            ),
            f"{POD}/second": ContainerRecord(pod_uid=UID, inode=42, ours=[1000], original=0),
        }
    ),
    node_files.CODECS[SYSCTL]: FileRows(
        values={
            "vm.min_free_kbytes": NodeFileState(original=67584, ours=(200000, 250000), policy="watermarks"),
            "vm.watermark_scale_factor": NodeFileState(original=10, ours=(150,), policy="watermarks"),
        }
    ),
    tasks.CODEC: CookieState(ours={0x9BFF8A4412C0: "online", 0x9BFF8A4413C0: "reclaimed", 2**63 + 5: "reclaimed"}),
    resctrl.CODEC: ResctrlState(
        groups=True,
        place="/sys/fs/resctrl",
        original={"L3": {0: 0xFFFFF, 1: 0xFFFFF}, "MB": {0: 100, 1: 100}},
        written=({"L3": {0: 0xFFF00, 1: 0xFFF00}}, {"L3": {0: 0xFF000, 1: 0xFF000}, "MB": {0: 90, 1: 90}}),
    ),
    network.CODEC: NetworkState(
        roots={"eth0": "mq", "eth1": ""},
        sent=Redirects(
            ifb=True,
            redirects={
                "veth0a1b2c3d": Redirect(index=17, pod_uid=UID, owns_qdisc=True, slot=1),
                "veth4e5f6a7b": Redirect(
                    index=19, pod_uid="22222222-2222-4222-8222-222222222222", owns_qdisc=False, slot=2
                ),
            },
        ),
    ),
}
"""The rows beside control files."""


def _file(controller: str, path: str, file: str, knob: str, **more: Any) -> LedgerEntry:
    return LedgerEntry(controller=controller, path=path, file=file, knob=knob, **more)


_OF_BOX: Final = {"inode": 41, "pod_uid": UID, "container_id": "c1"}
CONTROL_FILES: Final = (
    _file("cpuset", BOX, "cpuset.cpus", "cpu.set", original="0-7", **_OF_BOX),
    _file("cpu", BOX, "cpu.shares", "cpu.weight", original="102", origin=OriginalSource.SPEC, **_OF_BOX),
    _file("cpu", "/kubepods/besteffort", "cpu.cfs_quota_us", "cpu.quota", inode=40, original="-1"),
    _file("memory", BOX, "memory.limit_in_bytes", "memory.max", inode=41, pod_uid=UID),
)
"""The control files; the last one's original was lost."""


def write(directory: str) -> None:
    """A killed daemon's store, with its second copy and the values that were about to be written."""
    os.makedirs(directory)
    store = Store(os.path.join(directory, "state.db"), boot=BOOT, version="0.1.0", node="node1", clock=lambda: AT)
    ledger = Ledger(store, clock=lambda: AT)
    ledger.first_touches(CONTROL_FILES[:3])
    ledger.adopt(CONTROL_FILES[3:])
    cpus, shares, quota, _ = (row.key for row in CONTROL_FILES)
    ledger.want(cpus, "6-7", policy="reclaimed", reason="BE runs on CPU 6-7 (2 of 8 eligible)")
    ledger.wrote(cpus, before="0-7", after="6-7", at=AT + 1)
    ledger.want(shares, "2", policy="reclaimed", reason="minimum CPU weight: online pods go first")
    ledger.wrote(shares, before="102", after="2", at=AT + 1)
    ledger.rebase(shares, "204")
    ledger.want(quota, "50000", policy="be_quota", reason="enforced as CPU quota on kubepods/besteffort")
    ledger.wrote(quota, before="-1", after="50000", at=AT + 2)
    ledger.saw(quota, "70000", writer="host", process="tuned", at=AT + 3)
    ledger.set_yielded(quota, True, reason="changed 3 times")
    ledger.failed(cpus, errno=16, error="EBUSY", at=AT + 4)
    ledger.flush()
    ledger.intend([(cpus, "4-7")])
    for codec, state in KNOWN.items():
        write_rows(ledger, codec, state)
    batch = StoreBatch()
    batch.put(META, RUNNING, msgpack.packb(True))
    batch.put(HOLDS, "node", msgpack.packb({"target": "node", "reason": "maintenance", "by": "root", "until": None}))
    store.apply(batch)
    store.close()


if __name__ == "__main__":
    write(sys.argv[1])
