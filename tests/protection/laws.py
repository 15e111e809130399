"""The laws that are compared: who holds BE work back, and how.

``alone``: there is no BE work. ``again``: the same, measured where the others measure BE work, so what it differs from
alone by is the machine. ``unmanaged``: BE pods with the online pod's share of the CPU, and no agent.
``kubernetes``: BestEffort pods, shares 2, no agent. ``fixed``: a quota on kubepods/besteffort of 65 % of the
machine less what online work uses alone, as the peers' law has it once it has settled. The others are bypassd with a
configuration: ``quota`` is plain enforcing (the quota law without the idle class), ``cpu``, ``memory`` and ``full`` are
the presets, ``idle_groups`` and ``idle_threads`` the idle class of one side with the law that follows from it,
``kept`` is ``cpu`` with one CPU on which no BE work runs,
``idle_only`` idle groups without CPU set and budget, ``agent_only`` the same without these: the running daemon's part.
"""

from collections.abc import Mapping
from typing import Any, Final

from msgspec import Struct

FIXED_PERCENT: Final = 65


class Law(Struct, frozen=True, kw_only=True):
    """One law. ``config``: bypassd's sections, None: it does not run. ``fixed``: the quota of the peers' law.

    ``be``: BE pods are BestEffort for Kubernetes; else they have an online pod's CPU request. ``control``: no BE work.
    """

    name: str
    config: Mapping[str, Any] | None = None
    fixed: bool = False
    be: bool = True
    control: bool = False


def _idle(**sides: bool) -> dict[str, Any]:
    return {"protect": "cpu", "policies": {"idle_class": sides}}


def _bare(*, idle: bool) -> dict[str, Any]:
    idle_class = {"enabled": idle, "group": True, "threads": False, "always": True}
    # Each its own: the daemon refuses a configuration with aliases.
    return {"policies": {"reclaimed": {"enabled": False}, "idle_buffer": {"enabled": False}, "idle_class": idle_class}}


LAWS: Final = {
    law.name: law
    for law in (
        Law(name="alone", control=True),
        Law(name="again", control=True),
        Law(name="unmanaged", be=False),
        Law(name="kubernetes"),
        Law(name="fixed", fixed=True),
        Law(name="quota", config={}),
        Law(name="cpu", config={"protect": "cpu"}),
        Law(name="memory", config={"protect": "cpu+memory"}),
        Law(name="full", config={"protect": "full"}),
        Law(name="kept", config={"protect": "cpu", "policies": {"reserve": {"cpus": "0"}}}),
        Law(name="idle_groups", config=_idle(group=True, threads=False, always=True)),
        Law(name="idle_threads", config=_idle(group=False, threads=True)),
        Law(name="idle_only", config=_bare(idle=True)),
        Law(name="agent_only", config=_bare(idle=False)),
    )
}
USUAL: Final = ("again", "kubernetes", "fixed", "cpu", "full")
"""Those that are compared when none are named."""
WHOLE: Final = ("again", "unmanaged", "kubernetes", "fixed", "quota", "cpu", "full")
"""Those of the whole measurement."""
