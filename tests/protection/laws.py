"""The laws that are compared: who holds BE work back, and how.

``alone``: there is no BE work. ``unmanaged``: BE pods with the online pod's share of the CPU, and nobody at work.
``kubernetes``: BestEffort pods, shares 2, nobody at work. ``fixed``: a quota on kubepods/besteffort of 65 % of the
machine less what online work uses alone, as the peers' law has it once it has settled. The others are bypassd with a
configuration; ``idle``, ``idle_threads`` and ``idle_both`` have the idle class on pods' groups, on threads, or on both.
"""

from collections.abc import Mapping
from typing import Any, Final

from msgspec import Struct

FIXED_PERCENT: Final = 65


class Law(Struct, frozen=True, kw_only=True):
    """One law. ``config``: bypassd's sections, None: it does not run. ``fixed``: the quota of the peers' law.

    ``be``: BE pods are BestEffort for Kubernetes; else they have an online pod's CPU request.
    """

    name: str
    config: Mapping[str, Any] | None = None
    fixed: bool = False
    be: bool = True


def _idle(**sides: bool) -> dict[str, Any]:
    return {"policies": {"idle_class": {"enabled": True, **sides}}}


LAWS: Final = {
    law.name: law
    for law in (
        Law(name="alone"),
        Law(name="unmanaged", be=False),
        Law(name="kubernetes"),
        Law(name="fixed", fixed=True),
        Law(name="bypassd", config={}),
        Law(name="idle", config=_idle()),
        Law(name="idle_threads", config=_idle(group=False, threads=True)),
        Law(name="idle_both", config=_idle(threads=True)),
    )
}
