"""The registration of the side actuators: which there are, from configuration, and how all are undone without a daemon.

A new one is a file in `actuators` that implements `actuators.side.SideActuator`, and one entry in each function here.
"""

from collections.abc import Sequence

from reconciler.actuators.side import SideActuator
from reconciler.config import Config
from reconciler.place import Place
from reconciler.restore import Undone
from state.store import Store


def build(config: Config, place: Place, store: Store) -> tuple[SideActuator, ...]:
    """Those that the configuration enables."""
    del config, place, store
    return ()


async def restore_without_daemon(root: str, store: Store, only: str | None) -> Sequence[Undone]:
    """Undo what they left on this node, as the store and marks of ours tell. Errors: none; they are in the answer."""
    del root, store, only
    return ()
