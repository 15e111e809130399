"""``bypassd`` with other constants of its laws, for a test that would wait for them.

The product has no such face: `DaemonProcess` starts this instead of the program, with the constants in the environment.
"""

import json
import os
import sys
from collections.abc import Sequence

from reconciler.daemon.main import main as daemon
from tests.fakes.constants import applied
from tests.fakes.daemonprocess import CONSTANTS


def main(arguments: Sequence[str] | None = None) -> int:
    """Set the constants, then be the daemon."""
    with applied(json.loads(os.environ.pop(CONSTANTS, "{}"))):
        return daemon(arguments)


if __name__ == "__main__":
    sys.exit(main())
