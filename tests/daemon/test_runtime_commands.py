"""Commands of the runtime for BE containers, which have the start allowance, and programs that only read its files."""

from collections.abc import Callable

from tests.daemon.process import Daemon, bounded, wait_for
from tests.fakes.node import DirectoryNode

LONG: dict[str, object] = {"constants": {"policies.reclaimed.start.command_s": 10.0}}
"""An allowance that a look after the command cannot miss."""
RAISED = "262144"
"""Shares of a BE pod's directory that has the allowance."""


def test_bypassctl_that_reads_the_runtimes_records_is_no_command(
    node: DirectoryNode, daemon: Callable[..., Daemon]
) -> None:
    pod = node.add("batch")
    item = daemon(**LONG).up()
    wait_for(lambda: bounded(node, pod.main), told=item.tail)

    def shares() -> str:
        return node.read(pod.group, "cpu", "cpu.shares")

    before = shares()
    assert before != RAISED
    for message in (("plan", "-o", "json"), ("capture", f"{node.root}/captured")):
        ran = item.control(*message)
        assert ran.returncode == 0, ran.stderr
        item.look_again()
        assert shares() == before, message
    with open(f"{node.runc_root}/{pod.main.id}/state.json", "rb") as file:
        file.read()  # runc exec
    wait_for(lambda: shares() == RAISED, told=item.tail)
