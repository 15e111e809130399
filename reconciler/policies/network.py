"""network: BE pods share a bounded part of the interfaces that the configuration names; online work has the rest.

On each such interface stands an HTB tree of ours with two classes: online, which everything is in that has no class,
with its share guaranteed; and BE, with a floor that it always gets and a ceiling that follows what online work uses
(`reconciler.networklaw`). BE's sockets are told by ``net_cls.classid`` of their cgroup, so this needs cgroup v1's
net_cls. The kernel's ``cls_cgroup`` is not asked for: a two-instruction BPF classifier reads the same number, and is
there on more kernels. Opt-in. Only what leaves the node is bounded.

A packet carries its socket's class only within its network namespace: a pod with one of its own has left it when the
node forwards its packets, and they count as online. Bounded are BE pods in the host's network, and interfaces of
namespaces that bypassd runs in. Koordinator goes by addresses (ipset) there, which source NAT and overlays hide again.

`reconciler.actuators.network` does it; restore takes the tree away, and the kernel puts its default back.
"""

from typing import Annotated, Final

from msgspec import Meta, Struct
from msgspec.structs import replace

from reconciler.policies.base import Policy, PolicyConfig
from reconciler.policies.offers import lacking
from state.model import ContainerKind, NodeView, Pod, PodClass, Pools, Setting
from state.network import BE_CLASS, InterfaceWish, NetworkWish

NAME: Final = "network"
KNOB: Final = "net.classid"
_LONGEST: Final = 15
"""Letters of an interface's name that the kernel knows (IFNAMSIZ - 1)."""


class InterfaceRule(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One interface, and what of it is BE's. Percents are of the link's speed."""

    name: Annotated[str, Meta(min_length=1, max_length=_LONGEST, description="the interface, such as eth0")]
    link_mbit: Annotated[
        Annotated[int, Meta(ge=1, le=1_000_000)] | None,
        Meta(description="speed of the link in megabits a second; null: what the driver tells"),
    ] = None
    floor_percent: Annotated[
        float, Meta(ge=1, le=90, description="BE always gets this much, online work is guaranteed the rest")
    ] = 10.0
    ceiling_percent: Annotated[float, Meta(ge=1, le=100, description="BE never gets more than this")] = 40.0
    waterline_percent: Annotated[
        float, Meta(ge=1, le=100, description="BE's ceiling falls as online work and BE together come near this")
    ] = 80.0

    def __post_init__(self) -> None:
        if self.floor_percent > self.ceiling_percent:
            raise ValueError(
                f"floor_percent is {self.floor_percent:g}; expected at most ceiling_percent, {self.ceiling_percent:g}"
            )


class NetworkConfig(PolicyConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which interfaces, and how often the ceiling follows."""

    enabled: Annotated[bool, Meta(description="bound what BE pods send; needs cgroup v1's net_cls")] = False
    interval_s: Annotated[
        float, Meta(ge=0.1, le=60, description="how often BE's ceiling follows what online work uses")
    ] = 1.0
    interfaces: Annotated[
        tuple[InterfaceRule, ...], Meta(description="the interfaces that are ours to manage; no other is touched")
    ] = ()

    def __post_init__(self) -> None:
        names = [rule.name for rule in self.interfaces]
        if len(set(names)) != len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"interfaces has {twice!r} twice; expected each interface once")


def carve(view: NodeView, pools: Pools, previous: Pools | None, config: NetworkConfig) -> Pools:
    """Say what is wanted of which interface; nothing where BE's packets cannot be told from others."""
    del previous
    if not config.interfaces:
        return replace(pools, reasons={**pools.reasons, NAME: "no interface is named"})
    if (missing := lacking(view, KNOB)) is not None:
        return replace(pools, reasons={**pools.reasons, NAME: missing})
    wish = NetworkWish(
        interfaces=tuple(
            InterfaceWish(
                name=rule.name,
                link_mbit=rule.link_mbit,
                floor_percent=rule.floor_percent,
                ceiling_percent=rule.ceiling_percent,
                waterline_percent=rule.waterline_percent,
            )
            for rule in config.interfaces
        ),
        interval_s=config.interval_s,
        dry_run=config.dry_run,
    )
    names = ", ".join(rule.name for rule in config.interfaces)
    return replace(pools, network=wish, reasons={**pools.reasons, NAME: f"BE's share of {names} is bounded"})


def for_pod(pod: Pod, view: NodeView, pools: Pools, config: NetworkConfig) -> list[Setting]:
    """The class of a BE pod's sockets: its directory, which newcomers copy, and its containers."""
    del view, config
    if pod.pod_class is not PodClass.RECLAIMED or pools.network is None:
        return []
    groups: list[tuple[str, str | None]] = [(pod.group.path, None)]
    groups += [(one.group.path, one.id) for one in pod.containers if one.kind is not ContainerKind.SANDBOX]
    return [
        Setting(
            path=path,
            knob=KNOB,
            value=BE_CLASS,
            policy=NAME,
            reason="BE's class on the named interfaces",
            pod_uid=pod.uid,
            container_id=container,
        )
        for path, container in groups
    ]


POLICY = Policy(
    name=NAME,
    summary="a bounded share of the named interfaces for BE pods, following what online work uses",
    config_type=NetworkConfig,
    precedence=62,
    carve=carve,
    pod=for_pod,
)
