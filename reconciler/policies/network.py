"""network: BE pods share a bounded part of the interfaces that the configuration names; online work has the rest.

BE has a guaranteed floor and a ceiling that follows the use of online work (`reconciler.policies.network_control`).
Opt-in; traffic that leaves the node is limited, and with ``receive`` what reaches BE pods with a network namespace of
their own. BE's packets are limited at a point where they can be classified:

- Of pods in the host's network by the class id of their sockets (``net_cls.classid``, cgroup v1), at the named
  interface: an HTB tree with two classes, online, which has all traffic without a class, and BE.
- Packets of pods with a network namespace of their own have lost their class when the node forwards them. They are
  taken at the host's end of the pod's veth pair, and redirected through one device of bypassd's (an IFB), on which all
  of them share one HTB class. This needs neither net_cls nor BPF, and is the same on both versions of cgroups.
- Packets to those pods in the same way at the same place, through a second device.

`reconciler.control.network_loop` runs it; restore removes all of it, and the kernel puts its default back.
"""

from typing import Annotated, ClassVar, Final

from msgspec import Meta, Struct, convert
from msgspec.structs import replace

from reconciler.policies.base import Policy, PolicyConfig, setting_of, unsupported_reason
from state.model import NodeView, Pod, PodClass, Setting
from state.network import BE_CLASS, InterfaceRequest, NetworkRequest
from state.plan import NodePlan

NAME: Final = "network"
KNOB: Final = "net.classid"
_LONGEST: Final = 15
"""Longest name of an interface, in bytes (IFNAMSIZ - 1)."""


class InterfaceRule(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """BE's part of an interface, in percent of the link's speed."""

    name: Annotated[str, Meta(min_length=1, max_length=_LONGEST, description="the interface, such as eth0")]
    link_mbit: Annotated[
        Annotated[int, Meta(ge=1, le=1_000_000)] | None,
        Meta(
            description="link speed in megabits per second; null: as the driver reports; if it reports none, no limit "
            "applies"
        ),
    ] = None
    floor_percent: Annotated[
        float, Meta(ge=1, le=90, description="minimum share of BE; the rest is guaranteed to online work")
    ] = 10.0
    ceiling_percent: Annotated[float, Meta(ge=1, le=100, description="maximum share of BE")] = 40.0
    waterline_percent: Annotated[
        float,
        Meta(
            ge=1,
            le=100,
            description="target use of the link; near it the BE limit decreases",
        ),
    ] = 80.0

    def __post_init__(self) -> None:
        if self.floor_percent > self.ceiling_percent:
            raise ValueError(
                f"floor_percent is {self.floor_percent:g}; expected at most ceiling_percent, {self.ceiling_percent:g}"
            )


class NetworkConfig(PolicyConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which interfaces, and how often the ceiling follows."""

    enabled: Annotated[bool, Meta(description="limit the traffic that BE pods send")] = False
    interfaces: Annotated[
        tuple[InterfaceRule, ...],
        Meta(description="the managed interfaces; elsewhere only BE pods' devices are changed"),
    ] = ()
    # At the host's end: a queue in the pod's own device would be a share for each pod instead of one for all, set from
    # inside a namespace in which others may undo it. Koordinator matches addresses (ipset) at the interface, which
    # source NAT and overlays hide again.
    pods: Annotated[
        bool, Meta(description="also limit BE pods with their own network namespace, at the host's veth end")
    ] = True
    pods_by: Annotated[
        str | None,
        Meta(description="the interface through which those pods leave; null: the first"),
    ] = None
    # Off by default: those packets have used the link already. Their senders reduce their rate because packets wait and
    # are dropped, which UDP senders may not do.
    receive: Annotated[
        bool, Meta(description="limit what those pods receive, by the same percentages, as well as what they send")
    ] = False

    # Counters of a shorter time follow single bursts, and each change is a netlink request.
    interval_s: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        if self.receive and not self.pods:
            raise ValueError(
                "receive is true; expected false where pods is false: only at their veth devices is a limit"
            )
        names = [rule.name for rule in self.interfaces]
        if self.pods_by is not None and self.pods_by not in names:
            expected = ", ".join(names) or "null: interfaces is empty"
            raise ValueError(f"pods_by is {self.pods_by!r}; expected one of the interfaces, {expected}")
        if len(set(names)) != len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"interfaces has {twice!r} twice; expected each interface once")


def decide_resources(view: NodeView, plan: NodePlan, previous: NodePlan | None, config: NetworkConfig) -> NodePlan:
    """Which interfaces are limited, and how; none where BE packets cannot be classified."""
    if not config.interfaces:
        return replace(plan, reasons={**plan.reasons, NAME: "no interface configured"})
    missing = unsupported_reason(view, KNOB)
    if missing is not None and not config.pods:
        return replace(plan, reasons={**plan.reasons, NAME: missing})
    wish = NetworkRequest(
        interfaces=tuple(convert(rule, InterfaceRequest, from_attributes=True) for rule in config.interfaces),
        interval_s=config.interval_s,
        dry_run=config.dry_run,
        classes=missing is None,
        pods_by=(config.pods_by or config.interfaces[0].name) if config.pods else "",
        receive=config.receive,
    )
    names = ", ".join(rule.name for rule in config.interfaces)
    reason = f"BE traffic limited on {names}"
    if missing is not None:
        reason = f"BE traffic limited on {wish.pods_by}, except for pods in the host network: {missing}"
    if wish.receive:
        reason += f"; what BE pods receive by {wish.pods_by} too, except for pods in the host network"
    return replace(plan, network=wish, reasons={**plan.reasons, NAME: reason})


def for_pod(pod: Pod, view: NodeView, plan: NodePlan, config: NetworkConfig) -> list[Setting]:
    """The class of a BE pod's sockets: its directory, which newcomers copy, and its containers."""
    if pod.pod_class is not PodClass.RECLAIMED or plan.network is None or not plan.network.classes:
        return []
    reason = "BE traffic class on the managed interfaces"
    return [setting_of(pod, item, KNOB, BE_CLASS, policy=NAME, reason=reason) for item in (None, *pod.workload)]


POLICY = Policy(
    name=NAME,
    summary="a share of the interfaces for BE pods, adjusted to online traffic",
    config_type=NetworkConfig,
    precedence=62,
    decide_resources=decide_resources,
    pod=for_pod,
)
