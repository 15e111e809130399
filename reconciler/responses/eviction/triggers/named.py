"""The last step of the responses to interference: a rule has named the suspect, and nothing milder has helped."""

from typing import Final

from msgspec import Struct

from reconciler.responses.eviction.resources import OF_RESOURCE
from reconciler.responses.eviction.triggers.base import EVERY, Pressure
from state.evidence import Resource

NAME: Final = "interference"


class Named(Struct, frozen=True, kw_only=True):
    """A suspect that should go. ``rule``, ``victim`` (its title) and ``evidence`` tell people for whom and why."""

    uid: str
    rule: str
    victim: str
    evidence: str
    resource: Resource = Resource.CPU


def pressure_of(named: Named) -> Pressure:
    """The same as a pressure: soft, for this pod alone, and as bound by exclusions and limits as any other."""
    return Pressure(
        trigger=NAME,
        good=OF_RESOURCE[named.resource],
        evidence=f"rule {named.rule}: {named.victim} suffers: {named.evidence}",
        classes=EVERY,
        only=frozenset((named.uid,)),
        named=True,
    )
