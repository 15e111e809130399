"""The last step of the responses to interference: a rule has named the suspect, and nothing milder has helped."""

from typing import Final

from msgspec import Struct

from reconciler.responses.eviction.resources import OF_RESOURCE
from reconciler.responses.eviction.triggers.base import Shortage
from state.evidence import ContendedResource

NAME: Final = "interference"


class RequestedVictim(Struct, frozen=True, kw_only=True):
    """A suspect to be evicted. ``rule``, ``victim`` (its title) and ``evidence`` explain it to people."""

    uid: str
    rule: str
    victim: str
    evidence: str
    resource: ContendedResource = ContendedResource.CPU


def pressure_of(named: RequestedVictim) -> Shortage:
    """The same as a pressure: soft, for this BE pod only, and as bound by exclusions and limits as any other."""
    return Shortage(
        trigger=NAME,
        good=OF_RESOURCE[named.resource],
        evidence=f"rule {named.rule}: victim {named.victim}: {named.evidence}",
        only=frozenset((named.uid,)),
        named=True,
    )
