"""Real servers of Debian as online services: how each is started, and what is requested of it."""

import json
import os
import pwd
import random
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from glob import glob
from pathlib import Path
from typing import Final, NamedTuple

from tests.fakes.ports import listening

SETS: Final = 200
NODE_PROGRAM: Final = """
const http = require('http');
const rows = Array.from({length: 200}, (_, n) => ({id: n, name: 'row ' + n, tags: ['a', 'b', String(n)]}));
http.createServer((request, response) => {
  const body = JSON.stringify(JSON.parse(JSON.stringify(rows)).filter(row => row.id % 3));
  response.writeHead(200, {'Content-Length': Buffer.byteLength(body)});
  response.end(body);
}).listen(Number(process.argv[1]), '127.0.0.1');
"""
"""A request makes and parses some 15 kB of JSON: code compiled just in time, a collector with threads of its own."""


class Service(NamedTuple):
    """One server. ``prepare`` makes what it needs in a directory and returns its command line.

    ``protocol``, ``target``: as the generator has them. ``needs``: what must be installed, as a program or a directory.
    """

    name: str
    protocol: str
    target: str
    needs: str
    connections: int
    prepare: Callable[[str, int], list[str]]

    @property
    def missing(self) -> bool:
        """Whether Debian's package is not installed."""
        return shutil.which(self.needs) is None and not glob(self.needs)


def _redis(directory: str, port: int) -> list[str]:
    """Sets of 1000 members, made once: to intersect two of them is some 50 us of hash look-ups."""
    options = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", directory]
    server = ["/usr/bin/redis-server", *options]
    if not Path(directory, "dump.rdb").exists():
        draw = random.Random(1)
        sets = (f"SADD s:{number:04} {' '.join(map(str, draw.sample(range(10_000), 1000)))}" for number in range(SETS))
        with subprocess.Popen(server, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as running:
            try:
                listening(port, within_s=30)
                with (
                    socket.create_connection(("127.0.0.1", port), timeout=30) as client,
                    client.makefile("rwb") as file,
                ):
                    for command in (*sets, "SAVE"):
                        file.write(f"{command}\r\n".encode())
                        file.flush()
                        answer = file.readline()
                        if answer[:1] not in b":+":
                            raise RuntimeError(f"redis: {command[:40]}: {answer!r}")
            finally:
                running.terminate()
    return server


def _nginx(directory: str, port: int) -> list[str]:
    """A file of 58 kB, compressed at each request, which is some 300 us."""
    root = Path(directory)
    rows = [{"id": number, "name": f"row {number}", "tags": ["a", "b", str(number)]} for number in range(1000)]
    (root / "file").write_text(json.dumps(rows))
    (root / "nginx.conf").write_text(
        "daemon off; user root; worker_processes 2; error_log stderr crit; "
        f"pid {directory}/nginx.pid; events {{ worker_connections 512; }} http {{ access_log off; "
        "gzip on; gzip_types *; gzip_comp_level 5; "
        f"keepalive_requests 100000000; server {{ listen 127.0.0.1:{port}; root {directory}; }} }}"
    )
    return ["/usr/sbin/nginx", "-p", directory, "-c", f"{directory}/nginx.conf"]


def _node(directory: str, port: int) -> list[str]:
    del directory
    return ["/usr/bin/node", "-e", NODE_PROGRAM, str(port)]


def _postgres(directory: str, port: int) -> list[str]:
    """A database of pgbench's, 100,000 rows, made once."""
    binaries = max(glob("/usr/lib/postgresql/*/bin"))
    account = pwd.getpwnam("postgres")
    data = f"{directory}/data"
    drop = ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups", "--"]
    server = [f"{binaries}/postgres", "-D", data, "-p", str(port), "-k", directory]
    server += ["-c", "listen_addresses=127.0.0.1", "-c", "shared_buffers=128MB", "-c", "autovacuum=off"]
    os.chown(directory, account.pw_uid, account.pw_gid)
    os.chmod(directory, 0o755)
    if not os.path.isdir(data):
        options = ["-D", data, "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync"]
        _checked([*drop, f"{binaries}/initdb", *options])
        with subprocess.Popen([*drop, *server], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as running:
            try:
                listening(port, within_s=30)
                _checked(
                    [
                        *drop,
                        f"{binaries}/pgbench",
                        "-i",
                        "-q",
                        "-s",
                        "1",
                        "-h",
                        "127.0.0.1",
                        "-p",
                        str(port),
                        "postgres",
                    ]
                )
            finally:
                running.terminate()
    return [*drop, *server]


def _checked(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd="/")
    if done.returncode:
        raise RuntimeError(f"{command[5]}: {done.stderr.strip()[-500:]}")


SERVICES: Final = {
    service.name: service
    for service in (
        Service("redis", "redis", str(SETS), "/usr/bin/redis-server", 16, _redis),
        Service("nginx", "http", "/file", "/usr/sbin/nginx", 16, _nginx),
        Service("postgres", "postgres", "postgres", "/usr/lib/postgresql/*/bin/postgres", 8, _postgres),
        Service("node", "http", "/", "/usr/bin/node", 16, _node),
    )
}


def installed(names: str) -> list[Service]:
    """Services by their names, with commas between them, without those that are not installed, which is printed.

    Errors: `KeyError`.
    """
    wanted = [SERVICES[name] for name in names.split(",")]
    for service in wanted:
        if service.missing:
            print(f"{service.name}: NOT MEASURED: {service.needs} is not installed", file=sys.stderr)
    return [service for service in wanted if not service.missing]


class Load(NamedTuple):
    """What the generator measured, open loop. Times in microseconds from the intended arrival; ``cpu``: CPUs used."""

    rate: float
    p50: float
    p99: float
    p999: float
    worst: float
    late_p99: float
    cpu: float
    realtime: bool
    errors: int
    unanswered: int
    windows: tuple[float, ...]


def start_load(
    program: str, service: Service, port: int, rate: float, *, warmup_s: float, seconds: float, seed: int
) -> subprocess.Popen[str]:
    """The generator, at work: one process of real-time priority outside of every pod."""
    numbers = [f"{rate:.1f}", str(service.connections), f"{warmup_s}", f"{seconds}", str(seed)]
    command = [program, service.protocol, str(port), *numbers, service.target]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def loaded(running: subprocess.Popen[str]) -> Load:
    """Its result; waits for it. Errors: `RuntimeError`."""
    out, err = running.communicate()
    if running.returncode:
        raise RuntimeError(f"the generator ended with {running.returncode}: {err.strip()[-500:]}")
    fields = json.loads(out)
    return Load(
        rate=fields["rate"],
        p50=fields["p50"],
        p99=fields["p99"],
        p999=fields["p999"],
        worst=fields["max"],
        late_p99=fields["late_p99"],
        cpu=fields["cpu"],
        realtime=fields["realtime"],
        errors=fields["errors"],
        unanswered=fields["unanswered"] + fields["dropped"],
        windows=tuple(fields["windows_p99"]),
    )
