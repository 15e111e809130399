"""Restoring from the ledger alone, while no daemon runs; also after one was killed."""

import logging
import os
from typing import Any

import trio
from msgspec.structs import asdict

from cgroupfs.errors import SourceError
from cgroupfs.files import REAL, FileOps
from cgroupfs.hierarchy import Hierarchy
from cgroupfs.writer import Writer
from reconciler import __version__, sides
from reconciler.adopt import adopt_after_kill
from reconciler.cli.exits import CliError, Exit
from reconciler.instance import AlreadyRunningError, InstanceLock
from reconciler.keeper import RUNNING, was_killed
from reconciler.restore import Undone, restore_all
from reconciler.thaw import thaw, thaw_killed
from state.ledger import Ledger
from state.schema import META
from state.store import Batch, Store, boot_id


def restore_without_daemon(
    store_path: str, root: str, only: str | None, *, files: FileOps = REAL
) -> dict[str, Any]:  # the shape of the daemon's own answer
    """Take the lock, restore, and write down what was done.

    Errors: `CliError` when there is no store or hierarchy (`Exit.UNREACHABLE`), or a daemon has the lock
    (`Exit.REFUSED`); `NewerSchemaError`.
    """
    logging.basicConfig(handlers=[logging.NullHandler()])
    if not os.path.exists(store_path):
        raise CliError(f"{store_path}: there is no store here: nothing was ever written", Exit.UNREACHABLE)
    try:
        with InstanceLock(os.path.dirname(store_path)):
            done = _restore(store_path, root, only, files)
    except AlreadyRunningError as exc:
        raise CliError(f"{exc}, but does not answer; stop it first", Exit.REFUSED) from exc
    except SourceError as exc:
        raise CliError(str(exc), Exit.UNREACHABLE) from exc
    return {
        "files": [{**asdict(one), "undo": one.undo.value} for one in done],
        "restored": sum(one.ok for one in done),
        "left": sum(not one.ok for one in done),
        "mode": None,
    }


def thaw_without_daemon(store_path: str, root: str, *, files: FileOps = REAL) -> tuple[list[str], list[str]]:
    """Thaw what a daemon that is no more has left frozen: group paths, and what could not be done.

    Nothing at all where there is no store, no hierarchy, or a daemon that watches over it.
    """
    logging.basicConfig(handlers=[logging.NullHandler()])
    if not os.path.exists(store_path):
        return [], []
    try:
        with InstanceLock(os.path.dirname(store_path)):
            hierarchy = Hierarchy.detect(root)
            store = Store(store_path, boot=boot_id(root), version=__version__, node=os.uname().nodename)
            try:
                ledger = Ledger(store)
                done, failed = thaw(hierarchy, ledger, files=files)
                ledger.flush()
                killed, alive = thaw_killed(hierarchy, store)
                return [*done, *killed], [*failed, *alive]
            finally:
                store.close()
    except (AlreadyRunningError, SourceError):
        return [], []


def _restore(store_path: str, root: str, only: str | None, files: FileOps) -> list[Undone]:
    hierarchy = Hierarchy.detect(root)
    store = Store(store_path, boot=boot_id(root), version=__version__, node=os.uname().nodename)
    try:
        ledger = Ledger(store)
        if was_killed(store):
            adopt_after_kill(hierarchy, ledger, files=files)
            ledger.flush()
            # Adopted once: from here on a value that is not ours is somebody else's again.
            batch = Batch()
            batch.delete(META, RUNNING)
            store.apply(batch)
        writer = Writer(hierarchy, files=files)

        async def restore() -> list[Undone]:
            done = await restore_all(hierarchy, ledger, writer, files=files, only=only)
            return [*done, *await sides.restore_without_daemon(root, store, only)]

        done = trio.run(restore)
        ledger.flush()
        return done
    finally:
        store.close()
