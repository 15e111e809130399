"""What is remembered of the network, and how it is undone: by the daemon, and while none runs.

Everything is in the store before it is done, and told by marks besides (`state.network`), so that it is found when the
store is lost. Whoever leads packets through a device that is gone drops them: filters go first, their device after.
"""

from collections.abc import Mapping
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from cgroupfs.errors import SourceError
from reconciler.actuators.base import BootState, StateRow
from reconciler.actuators.network.tc import FILE, Tc
from reconciler.actuators.network.tc_pods import PodTc
from state.network import GATHER
from state.store import Store
from state.undo import RestoreOutcome, RestoreResult

FILTER: Final = "ingress filter"
DEVICE: Final = "device"


class Redirect(Struct, frozen=True, kw_only=True):
    """A cable whose packets are led through our device.

    ``made``: the discipline that our filter is in, is ours; ``slot``: the number of its class in our device.
    """

    index: int
    pod_uid: str
    made: bool
    slot: int = 0


class NetworkState(BootState, frozen=True, kw_only=True):
    """``roots``: by interface, the kind of root that our tree stands in for; ``gather``: our device may be there."""

    roots: Mapping[str, str] = {}
    gather: bool = False
    cables: Mapping[str, Redirect] = {}


ROW: Final = StateRow("network", NetworkState, "the network")


def restore_network(tc: Tc, pods: PodTc, store: Store, only: str | None = None) -> list[RestoreResult]:
    """Undo all of it while no daemon runs, also what a lost store does not tell of. Errors: `StoreError`."""
    kept = ROW.read(store)
    done, left = undo(tc, pods, kept, only)
    if left != kept:
        ROW.write(store, left)
    return done


def undo(tc: Tc, pods: PodTc, kept: NetworkState, only: str | None = None) -> tuple[list[RestoreResult], NetworkState]:
    """Take everything away (``only``: one pod's part), and what there is to remember then. Errors: none."""
    done, left = undo_pods(pods, kept, only)
    if only is not None:
        return done, left
    trees = remove_trees(tc, kept.roots)
    refused = {one.path for one in trees if not one.ok}
    return [*done, *trees], replace(left, roots={name: kind for name, kind in kept.roots.items() if name in refused})


def undo_pods(pods: PodTc, kept: NetworkState, only: str | None = None) -> tuple[list[RestoreResult], NetworkState]:
    """Take away what was done for pods with a network of their own, or one of them. Errors: none."""
    chosen = {name: led for name, led in kept.cables.items() if only in {None, led.pod_uid}}
    done = []
    if only is None:
        try:
            strays = {name: index for name, index in pods.led().items() if name not in chosen}
        except SourceError as exc:
            # Without a network stack that answers there is nothing of ours on it, unless the store says so.
            strays = {}
            done += [undone(GATHER, DEVICE, RestoreOutcome.REFUSED, str(exc))] if kept.gather and not chosen else []
        chosen |= {name: Redirect(index=index, pod_uid="", made=True) for name, index in strays.items()}
    done += [release(pods, name, led) for name, led in sorted(chosen.items())]
    refused = {one.path for one in done if not one.ok}
    cables = {name: led for name, led in kept.cables.items() if name not in chosen or name in refused}
    left = replace(kept, cables=cables)
    if only is None and not refused:
        try:
            if pods.unmake():
                done.append(undone(GATHER, DEVICE, RestoreOutcome.RESTORED))
            left = replace(left, gather=False)
        except SourceError as exc:
            done += [undone(GATHER, DEVICE, RestoreOutcome.REFUSED, str(exc))] if kept.gather else []
    return done, left


def release(pods: PodTc, name: str, led: Redirect) -> RestoreResult:
    """Let one cable's packets go their own way again. Errors: none."""
    try:
        there = pods.device(name)
        if there is None or there.index != led.index:
            return undone(name, FILTER, RestoreOutcome.GONE)
        entry = pods.entries([led.index])[led.index]
        pods.release(led.index, all_of_it=led.made)
    except SourceError as exc:
        return undone(name, FILTER, RestoreOutcome.REFUSED, str(exc))
    return undone(name, FILTER, RestoreOutcome.ALREADY if entry.leads_to is None else RestoreOutcome.RESTORED)


def remove_trees(tc: Tc, roots: Mapping[str, str], *, everywhere: bool = True) -> list[RestoreResult]:
    """Take our trees away, wherever they are or from these interfaces; what is said of each. Errors: none."""
    done = []
    try:
        found = {name: root for name, root in tc.names().items() if everywhere or name in roots}
    except SourceError as exc:
        return [undone(name, FILE, RestoreOutcome.REFUSED, str(exc)) for name in sorted(roots)]
    for name in sorted(found.keys() | roots.keys()):
        try:
            root = found.get(name)
            if root is None:
                done.append(
                    undone(name, FILE, RestoreOutcome.ALREADY if tc.root(name) is not None else RestoreOutcome.GONE)
                )
                continue
            tc.remove(root.index)
            after = tc.root(name)
            done.append(undone(name, FILE, RestoreOutcome.RESTORED, after.kind if after is not None else ""))
        except SourceError as exc:
            done.append(undone(name, FILE, RestoreOutcome.REFUSED, str(exc)))
    return done


def undone(name: str, file: str, undo: RestoreOutcome, words: str = "") -> RestoreResult:
    """What became of one trace; ``words``: what stands there now, or else why it does not."""
    if undo is RestoreOutcome.RESTORED:
        return RestoreResult(path=name, file=file, undo=undo, text=words)
    return RestoreResult(path=name, file=file, undo=undo, detail=words)
