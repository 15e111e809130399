"""``bypassctl headroom --withdraw``: takes back what a daemon that was killed has published to the cluster.

For the unit's ExecStopPost: without a note in the store, as after a clean stop, it ends at once. A running daemon does
it itself.
"""

import os
from argparse import Namespace
from typing import Final

import msgspec
import trio

from cgroupfs.bounded import decoded
from cgroupfs.errors import AgentError, StoreError
from reconciler import __version__
from reconciler.cli import places
from reconciler.cli.exits import CliError, Exit
from reconciler.cli.nodeview import InspectedNode, inspect_node
from reconciler.cli.screen import line, show
from reconciler.clients.kube import KubeApi
from reconciler.config.environment import node_name
from reconciler.headroom.cpu import ClusterTarget
from reconciler.headroom.publisher import PublishError
from reconciler.headroom.targets import withdraw_from
from reconciler.runtime.lock import AlreadyRunningError, InstanceLock
from state.reader import NoStoreError, read_tables
from state.schema import META, PUBLISHED
from state.store import Store, StoreBatch, boot_id

_TIMEOUT_S: Final = 15.0
"""Of systemd's TimeoutStopSec, which all steps of a stop share."""


def withdraw(options: Namespace) -> int:
    """Withdraw. Errors: `CliError` where it is still published, or a daemon runs."""
    store_path = places.find(options).store
    if options.root != "/":
        raise CliError("headroom --withdraw is of this node; it has no --root", Exit.USAGE)
    try:
        with InstanceLock(os.path.dirname(store_path)):
            target = _noted(store_path)
            if target is None:
                show([line("nothing is published")])
                return Exit.OK
            trio.run(_withdraw, inspect_node(options), target)
            _forget(store_path)
    except AlreadyRunningError as exc:
        raise CliError(f"{exc}; set headroom.publish: off and reload it", Exit.REFUSED) from exc
    except NoStoreError:
        show([line("nothing is published")])
        return Exit.OK
    except AgentError as exc:
        raise CliError(f"not withdrawn: {exc}", Exit.NOT_OK) from exc
    show([line(f"withdrawn from {target.value}")])
    return Exit.OK


def _noted(store_path: str) -> ClusterTarget | None:
    row = read_tables(store_path).rows[META].get(PUBLISHED)
    if row is None:
        return None
    try:
        return ClusterTarget(decoded(msgspec.msgpack.Decoder(str).decode, row))
    except ValueError as exc:
        raise StoreError(f"the note of what is published cannot be read: {exc}") from exc


async def _withdraw(node: InspectedNode, target: ClusterTarget) -> None:
    api = KubeApi(node.config.apiserver, root=node.root, kubelets=node.kubelet.kubeconfig)
    try:
        with trio.fail_after(_TIMEOUT_S):
            await withdraw_from(target, api, node_name(node.kubelet))
    except trio.TooSlowError as exc:
        raise PublishError(f"no answer of the API server within {_TIMEOUT_S:.0f} s") from exc
    finally:
        with trio.CancelScope(shield=True, deadline=trio.current_time() + 1.0):
            await api.aclose()


def _forget(store_path: str) -> None:
    """Errors: `StoreError`: the next start withdraws once more."""
    store = Store(store_path, boot=boot_id("/"), version=__version__, node=os.uname().nodename, must_record=False)
    try:
        batch = StoreBatch()
        batch.delete(META, PUBLISHED)
        store.apply(batch)
    finally:
        store.close()
