"""The control files of pods: their comparison, their writes, now and at the runtime's signal, and who else writes."""

from typing import Final, Protocol, final

from cgroupfs.writer import KernelWriter
from reconciler.actuators.cgroup.apply import CgroupActuator
from reconciler.actuators.cgroup.conflict import ForeignWrites, WriteAttribution
from reconciler.actuators.cgroup.decide import ChangeDetector, ValuesInPlace
from reconciler.actuators.cgroup.fastpath import FastPath
from reconciler.actuators.cgroup.foreign_rules import ForeignRules
from reconciler.actuators.cgroup.inner_groups import managed_above
from reconciler.actuators.cgroup.status import Alert
from reconciler.actuators.mode import WriteMode
from reconciler.control.hub import NodeBase
from reconciler.control.record import NodeRecord
from reconciler.runtime.object_errors import ObjectErrors
from reconciler.runtime.supervisor import Component
from state.model import SourceStatus

_PATIENCE_S: Final = 0.5
"""How long one pass waits for lowered memory limits, in all: enough for some 12 GB of page cache."""


class WriteRules(Protocol):
    """The configuration: other programs' values, and when a slow write counts as stuck."""

    @property
    def foreign(self) -> ForeignRules: ...

    @property
    def slow_timeout_s(self) -> float: ...


@final
class CgroupWrites:
    """The cgroup actuator with its fast path and the attribution of foreign writes.

    `attribution` is a component; the others are called by the control loop.
    """

    def __init__(
        self,
        base: NodeBase,
        record: NodeRecord,
        mode: WriteMode,
        rules: WriteRules,
        alert: Alert,
    ) -> None:
        place, files, ledger = base.place, base.files, record.ledger
        hierarchy, layout = place.hierarchy, place.layout
        self.mode = mode
        self._foreign = ForeignWrites(rules.foreign)
        in_place = ValuesInPlace()

        def owner(path: str) -> str | None:
            name = layout.parse(path)
            return None if name is None else name.pod_uid

        def ours(path: str) -> bool:
            # A tenant's own groups inside a container are read when the container's set is written.
            return (bool(ledger.group(path)) or path in in_place) and managed_above(path) is None

        self.attribution = WriteAttribution(
            hierarchy, base.hub.changed, kubepods=layout.kubepods, owner=owner, ours=ours
        )
        self.fastpath = FastPath(base.hub.executed, waits=place.runtime.waits_for_start, files=files, root=place.root)
        self.judge = ChangeDetector(
            hierarchy=hierarchy,
            ledger=ledger,
            foreign=self._foreign,
            attribution=self.attribution,
            files=files,
            alert=alert,
            held=record.holds.add_manual,
            errors=ObjectErrors(),
            mode=mode,
            in_place=in_place,
            # A file's present value may be bypassd's then, and is not recorded as an original.
            lost=record.store.lost,
        )
        self.actuator = CgroupActuator(
            judge=self.judge,
            ledger=ledger,
            writer=KernelWriter(hierarchy, files=files, deadline_s=rules.slow_timeout_s, patience_s=_PATIENCE_S),
            lane=self.fastpath,
            store_lane=record.lane,
            watched=self.attribution,
        )
        for path in ledger.groups():
            self.attribution.follow(path)

    def use(self, rules: WriteRules) -> None:
        """Decide about other programs' values by these rules from now on."""
        self._foreign.use(rules.foreign)

    def component(self) -> Component:
        """The one that sees who writes."""
        return Component(name="write attribution", run=self.attribution.run)

    def statuses(self) -> list[SourceStatus]:
        return [self.attribution.status()]

    def released(self, path: str) -> None:
        """A hold on a file of this group has ended by command: what another program wrote before counts no more."""
        self._foreign.forget(path)
