"""reserve: CPUs of the system and the kubelet stay out of every other pool."""

from typing import Annotated

from msgspec import Meta
from msgspec.structs import replace

from cgroupfs.cpuset import MAX_CPUS, CpuSet
from reconciler.policies.base import Policy, PolicyConfig
from state.model import NodeView, Pools


class ReserveConfig(PolicyConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """CPUs kept for the host.

    Source: the kubelet's ``reservedSystemCPUs``. Unlike the kubelet, which only keeps exclusive pods off these CPUs,
    BE pods stay off them too.
    """

    cpus: Annotated[
        str,
        Meta(
            description="CPU list such as 0-1,16 that is reserved beside the kubelet's; empty: none of our own",
            pattern=r"^(\d{1,4}(-\d{1,4})?(,\d{1,4}(-\d{1,4})?)*)?$",
        ),
    ] = ""
    from_kubelet: Annotated[bool, Meta(description="take over the kubelet's reservedSystemCPUs")] = True

    def __post_init__(self) -> None:
        """Refuse what the pattern cannot: a range that runs backwards."""
        try:
            CpuSet.parse(self.cpus)
        except ValueError as exc:
            raise ValueError(f"cpus: {exc}; expected a CPU list below {MAX_CPUS}") from exc


def carve(view: NodeView, pools: Pools, previous: Pools | None, config: ReserveConfig) -> Pools:
    """Reserve the kubelet's and our own CPUs, as far as they are online."""
    del previous
    ours = CpuSet.parse(config.cpus)
    kubelets = view.kubelet.reserved if config.from_kubelet else CpuSet()
    wanted = ours | kubelets
    reserved = wanted & pools.online_cpus
    parts = [f"{name} {cpus}" for name, cpus in (("the kubelet's", kubelets), ("configured", ours)) if cpus]
    reason = " and ".join(parts) if parts else "nothing is reserved"
    if wanted != reserved:
        reason += f"; CPU {wanted - reserved} is not online"
    return replace(
        pools,
        reserved=reserved,
        shared=pools.shared - reserved,
        reasons={**pools.reasons, "reserved": reason},
    )


POLICY = Policy(
    name="reserve",
    summary="CPUs of the system and the kubelet stay out of every other pool",
    config_type=ReserveConfig,
    precedence=60,
    carve=carve,
)
