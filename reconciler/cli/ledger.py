"""Restoring from the ledger alone, while no daemon runs; also after one was killed."""

import logging
import os
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import trio
from msgspec.structs import asdict

from cgroupfs.errors import SourceError, StoreError
from cgroupfs.files import REAL, FileOps
from cgroupfs.hierarchy import Hierarchy
from cgroupfs.writer import KernelWriter
from reconciler import __version__
from reconciler.actuators.cgroup.records import records_of
from reconciler.actuators.cgroup.restore import adopt_unjournaled_writes, restore_all, unfreeze
from reconciler.actuators.restore import UndoKind, restore_ledger
from reconciler.cli.exits import CliError, Exit
from reconciler.config.load import DEFAULT_PATH
from reconciler.control import side_actuators
from reconciler.responses.eviction.journal import thaw_killed
from reconciler.runtime.lock import AlreadyRunningError, InstanceLock
from reconciler.runtime.own_group import remove_left
from state.entry import RestoreResult
from state.kinds import CGROUP
from state.ledger import Ledger
from state.quarantine import convert_newer
from state.reader import LostStoreError, NoStoreError, read_tables
from state.schema import META, PLACES, RUNNING, NewerSchemaError
from state.store import Store, StoreBatch, boot_id

if TYPE_CHECKING:
    from reconciler.clients.kube import KubeApi


def restore_without_daemon(
    store_path: str, root: str, only: str | None, *, config: str = DEFAULT_PATH, files: FileOps = REAL
) -> dict[str, Any]:  # the shape of the daemon's own answer
    """Take the lock, restore, and record the result, if that can be recorded.

    ``config``: the daemon's configuration file; it is read if the node's object in the cluster has a mark.

    A store of a newer version is converted to this one first. ``problem`` of the result: the fault of the store;
    ``lost``: files may be missing from the result; ``converted``: where the newer store was moved. Errors:
    `CliError` without a hierarchy, a store, or a reliable one (`Exit.UNREACHABLE`), or a daemon has the lock
    (`Exit.REFUSED`); `NewerSchemaError`.
    """
    logging.basicConfig(handlers=[logging.NullHandler()])  # the result has what the parts log
    try:
        tables = read_tables(store_path)
    except NewerSchemaError:
        raise
    except LostStoreError as exc:
        raise CliError(f"{exc}: the values that bypassd wrote are unknown", Exit.UNREACHABLE) from exc
    except StoreError as exc:
        raise CliError(str(exc), Exit.UNREACHABLE) from exc
    try:
        with InstanceLock(os.path.dirname(store_path)):
            aside, unconverted = _convert_newer(store_path)
            done, unrecorded = _restore(store_path, root, only, files, partial(_api, config))
            if only is None:
                # The group that a killed daemon made for itself.
                remove_left(Hierarchy.detect(root))
    except AlreadyRunningError as exc:
        raise CliError(f"{exc}, but does not answer; stop it first", Exit.REFUSED) from exc
    except (SourceError, StoreError) as exc:
        if isinstance(exc, NewerSchemaError):
            raise
        raise CliError(str(exc), Exit.UNREACHABLE) from exc
    return {
        "files": [{**asdict(result), "undo": result.undo.value} for result in done],
        "restored": sum(result.ok for result in done),
        "left": sum(not result.ok for result in done),
        "mode": None,
        "recorded": unrecorded is None,
        "lost": tables.lost,
        "problem": "; ".join(filter(None, [*tables.problems[:1], unconverted, unrecorded])) or None,
        "converted": aside,
    }


def thaw_without_daemon(store_path: str, root: str) -> tuple[list[str], list[str]]:
    """Thaw what a stopped daemon has left frozen: group paths, and what could not be done.

    Nothing at all without a store or a hierarchy, or with a daemon that watches over it. Errors: `CliError`
    (`Exit.UNREACHABLE`) for a store that cannot be read.
    """
    logging.basicConfig(handlers=[logging.NullHandler()])
    try:
        read_tables(store_path)
    except NoStoreError:
        return [], []
    except StoreError as exc:
        raise CliError(f"cannot determine which pods are frozen: {exc}", Exit.UNREACHABLE) from exc
    try:
        with InstanceLock(os.path.dirname(store_path)):
            hierarchy = Hierarchy.detect(root)
            store = open_store(store_path, root)
            try:
                ledger = Ledger(store)
                done, failed = unfreeze(hierarchy, ledger)
                ledger.flush()
                killed, alive = thaw_killed(hierarchy, store)
                return [*done, *killed], [*failed, *alive]
            finally:
                store.close()
    except (AlreadyRunningError, SourceError):
        return [], []


def _convert_newer(store_path: str) -> tuple[str | None, str | None]:
    """Where the store of a newer version was moved, and why it could not be converted: the files are first."""
    try:
        return convert_newer(store_path), None
    except NewerSchemaError:
        raise
    except StoreError as exc:
        return None, str(exc)


def open_store(store_path: str, root: str = "/") -> Store:
    """The store, whether or not it can be written: what is to be undone is first."""
    return Store(store_path, boot=boot_id(root), version=__version__, node=os.uname().nodename, must_record=False)


def _api(path: str) -> "KubeApi":
    """A client of the API server by the daemon's configuration. Errors: `SourceError` if that is invalid."""
    from reconciler.config import load
    from reconciler.config.environment import api_client, read_kubelet
    from reconciler.settings.binder import ConfigError

    try:
        config = load.load(path, required=False).config
    except ConfigError as exc:
        raise SourceError("configuration", str(exc)) from exc
    return api_client(config, read_kubelet(config))


def _restore(
    store_path: str, root: str, only: str | None, files: FileOps, api: "Callable[[], KubeApi]"
) -> tuple[list[RestoreResult], str | None]:
    """The results, and why they could not be recorded. Errors: `StoreError` when the ledger cannot be read."""
    hierarchy = Hierarchy.detect(root)
    store = open_store(store_path, root)
    try:
        ledger = Ledger(store)
        if store.unreadable is not None:
            raise StoreError(store.unreadable)
        meta = dict(store.rows(META))
        if RUNNING in meta:
            # The daemon was killed: its last values may be in files and not in the store.
            adopt_unjournaled_writes(hierarchy, ledger, files=files)
            ledger.flush()
            # Adopted once: from here on a differing value is another program's again.
            batch = StoreBatch()
            batch.delete(META, RUNNING)
            store.apply(batch)
        writer = KernelWriter(hierarchy, files=files)
        records = records_of(root, meta.get(PLACES))

        table: dict[str, UndoKind] = {
            CGROUP: partial(restore_all, hierarchy, ledger, writer, files=files, only=only, records=records),
            **side_actuators.restore_table_without_daemon(root, ledger, only, api),
        }
        done = trio.run(restore_ledger, ledger, table, side_actuators.codec_of, only)
        ledger.flush()
        return done, store.unrecorded
    finally:
        store.close()
