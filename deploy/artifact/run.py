"""What the launcher of the self-contained tree runs: ``run.py NAME ARGUMENTS...``, NAME one of the programs.

The interpreter is the tree's own. What it would take from the host by default is set here: the name of the process, the
interpreter for helper processes, and the file of certificate authorities, which is elsewhere on each distribution.
"""

import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
PREFIX = os.path.dirname(os.path.dirname(HERE))
AUTHORITIES = (
    "/etc/ssl/certs/ca-certificates.crt",  # Debian, Ubuntu, Alpine
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",  # CentOS, RHEL, Fedora
    "/etc/pki/tls/certs/ca-bundle.crt",  # CentOS 6 and 7
    "/etc/ssl/ca-bundle.pem",  # SUSE
)


def _name_process(name: str) -> None:
    """The loader is what was executed; ``ps`` and the journal are to show the program's name."""
    try:
        with open("/proc/self/comm", "w", encoding="ascii") as comm:
            comm.write(name)
    except OSError:
        pass  # read-only in some sandboxes; a name is all that is lost


def main() -> int:
    """Run the program that is named."""
    name = sys.argv.pop(1)
    sys.argv[0] = os.path.join(PREFIX, "bin", name)
    sys.executable = os.path.join(PREFIX, "bin", "bypassd-python")
    sys.path[:0] = [HERE, os.path.join(HERE, "packages")]
    _name_process(name)
    if not os.environ.keys() & {"SSL_CERT_FILE", "SSL_CERT_DIR"}:
        found = next((path for path in AUTHORITIES if os.path.exists(path)), None)
        if found is not None:
            os.environ["SSL_CERT_FILE"] = found
    import bypassd_main

    programs = {
        "bypassd": bypassd_main.bypassd,
        "bypassctl": bypassd_main.bypassctl,
        "state-dump": bypassd_main.state_dump,
    }
    return programs[name]()


if __name__ == "__main__":
    sys.exit(main())
