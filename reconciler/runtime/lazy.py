"""Imports by name: a table row or a configuration names an object that is imported when it is used.

Two ways of importing late are used in this project. Where the module is known when the code is written, an ``import``
statement is in the function that needs it. Where it is a text, in a table row or in a configuration, it has the form
``package.module:Attribute`` and is loaded by the functions here.
"""

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import trio


def split(path: str) -> tuple[str, str]:
    """``package.module:Attribute`` as its two names.

    Errors: `ValueError` when it does not have this form.
    """
    module, colon, attribute = path.partition(":")
    if not colon or not attribute.isidentifier() or not all(part.isidentifier() for part in module.split(".")):
        raise ValueError(f"expected package.module:Attribute; got {path!r}")
    return module, attribute


def load(path: str) -> object:
    """The object that ``package.module:Attribute`` names; its module is imported if it is not yet.

    Errors: `ValueError` for a path of another form, `ImportError` and `AttributeError` as Python raises them, and any
    exception of the module.
    """
    module, attribute = split(path)
    result: object = getattr(import_module(module), attribute)
    return result


async def import_in_thread(module: str, limiter: "trio.CapacityLimiter | None" = None) -> ModuleType:
    """Import a large module in a worker thread, so that the loop does not wait for it; a later import is immediate."""
    from reconciler.runtime.stints import in_worker  # programs without a loop load this module too

    return await in_worker(import_module, module, limiter=limiter)
