"""``bypassctl headroom --withdraw``: takes back what a daemon that was killed has published to the cluster.

That is the headroom, and the mark of a closed node. For the unit's ExecStopPost: without a note in the store, as after
a clean stop, it ends at once. A running daemon does it itself.
"""

import os
from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from typing import Final

import trio

from cgroupfs.errors import AgentError, StoreError
from reconciler.actuators.base import OfflineContext
from reconciler.actuators.node_mark import ACTUATOR
from reconciler.cli import places
from reconciler.cli.exits import CliError, Exit
from reconciler.cli.ledger import open_store
from reconciler.cli.nodeview import InspectedNode, inspect_node
from reconciler.cli.screen import line, show
from reconciler.config.environment import api_client
from reconciler.control.node_headroom import PublishedNote, decode_note
from reconciler.headroom.publisher import PublishError
from reconciler.headroom.targets import withdraw_from
from reconciler.runtime.lock import AlreadyRunningError, InstanceLock
from state.entry import RestoreOutcome, RestoreResult
from state.ledger import Ledger
from state.reader import NoStoreError, read_tables
from state.schema import FILES, META, PUBLISHED, outlives_boot
from state.store import StoreBatch, boot_id

_TIMEOUT_S: Final = 3.0
"""The node is without its daemon meanwhile; the next start tries again."""


def withdraw(options: Namespace) -> int:
    """Withdraw. Errors: `CliError` where it is still published, or a daemon runs."""
    store_path = places.find(options).store
    if options.root != "/":
        raise CliError("headroom --withdraw is of this node; it has no --root", Exit.USAGE)
    try:
        with InstanceLock(os.path.dirname(store_path)):
            noted = _noted(store_path)
            # Whether the node's object may have a mark.
            marked = any(outlives_boot(key) for key in read_tables(store_path).rows[FILES])
            if noted is None and not marked:
                show([line("nothing is published")])
                return Exit.OK
            node = inspect_node(options)
            if marked:
                # First: a closed node takes no pods.
                _unmark(store_path, node)
            if noted is not None:
                trio.run(_withdraw, node, noted)
                _forget(store_path)
    except AlreadyRunningError as exc:
        raise CliError(f"{exc}; set headroom.publish: off and reload it", Exit.REFUSED) from exc
    except NoStoreError:
        show([line("nothing is published")])
        return Exit.OK
    except AgentError as exc:
        raise CliError(f"not withdrawn: {exc}", Exit.NOT_OK) from exc
    if marked:
        show([line("the node is open to new BE pods again")])
    if noted is not None:
        show([line(f"withdrawn from {noted.target.value} of {noted.node}")])
    return Exit.OK


def _unmark(store_path: str, node: InspectedNode) -> None:
    """Remove the mark. Errors: `PublishError` where it is still there; `StoreError`."""
    store = open_store(store_path)
    try:
        ledger = Ledger(store)
        api = partial(api_client, node.config, node.kubelet)
        done = trio.run(_unmarked, OfflineContext(root="/", ledger=ledger, api=api))
        ledger.flush()
    finally:
        store.close()
    if failed := [result for result in done if result.undo is RestoreOutcome.REFUSED]:
        raise PublishError("; ".join(f"{result.file}: {result.detail}" for result in failed))


async def _unmarked(context: OfflineContext) -> Sequence[RestoreResult]:
    assert ACTUATOR.undo_online is not None
    try:
        with trio.fail_after(_TIMEOUT_S):
            return await ACTUATOR.undo_online(context)
    except trio.TooSlowError as exc:
        raise PublishError(f"no answer of the API server within {_TIMEOUT_S:.0f} s") from exc


def _noted(store_path: str) -> PublishedNote | None:
    row = read_tables(store_path).rows[META].get(PUBLISHED)
    try:
        return None if row is None else decode_note(row)
    except ValueError as exc:
        raise StoreError(f"the note of what is published cannot be read: {exc}") from exc


async def _withdraw(node: InspectedNode, note: PublishedNote) -> None:
    async with api_client(node.config, node.kubelet) as api:
        try:
            with trio.fail_after(_TIMEOUT_S):
                await withdraw_from(note.target, api, note.node, boot=boot_id("/"))
        except trio.TooSlowError as exc:
            raise PublishError(f"no answer of the API server within {_TIMEOUT_S:.0f} s") from exc


def _forget(store_path: str) -> None:
    """Errors: `StoreError`: the next start withdraws again."""
    store = open_store(store_path)
    try:
        batch = StoreBatch()
        batch.delete(META, PUBLISHED)
        store.apply(batch)
    finally:
        store.close()
