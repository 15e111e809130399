"""shared: online pods share what is neither reserved nor dedicated.

Nothing is written for them: they stay where the kubelet put them (its default set under the static policy, every CPU
under none). What protects them is that BE work is confined and bounded; narrowing online pods could only cost them
latency. The pool says which CPUs BE work must leave room on.
"""

from msgspec.structs import replace

from reconciler.policies.base import Policy, PolicyConfig
from state.model import NodeView, Pools


class SharedConfig(PolicyConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The shared pool has nothing to set: it is what the pools before it leave."""

    @property
    def measured(self) -> bool:
        """Whether pools are sized by what online pods use, so that their use has to be sampled: none is, yet."""
        return False


def carve(view: NodeView, pools: Pools, previous: Pools | None, config: SharedConfig) -> Pools:
    """Explain the pool, and keep it from being empty: the kubelet's default set never is."""
    del previous, config
    if pools.shared:
        reason = "neither reserved nor dedicated; online pods keep the CPU set the kubelet gave them"
        return replace(pools, reasons={**pools.reasons, "shared": reason})
    everything = pools.online_cpus
    shared = (view.kubelet.default_cpus & everything) or (everything - pools.dedicated_cpus) or everything
    reason = f"every CPU is reserved or dedicated; online pods run on CPU {shared} with the system"
    return replace(pools, shared=shared, reasons={**pools.reasons, "shared": reason})


POLICY = Policy(
    name="shared",
    summary="online pods share what is neither reserved nor dedicated",
    config_type=SharedConfig,
    precedence=50,
    carve=carve,
)
