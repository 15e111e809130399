"""How many examples hypothesis makes: few and always the same in `make test`, many and new ones in `make search`."""

import os
from typing import Final

SEARCH: Final = "BYPASSD_SEARCH" in os.environ


def examples(number: int) -> int:
    """Of one property or state machine; ``number``: between the two."""
    return 4 * number if SEARCH else max(10, number // 4)
