"""BE work stays off the CPUs that a kubelet inside another program reserves: from the program's files to the write.

The programs' files are tested in tests/reconciler/sources/test_kubelet_arguments.py.
"""

import pytest

from cgroupfs.cpuset import CpuSet
from tests.fakes.livenode import BATCH, LiveNode, container_id, group

UNIT = """\
[Service]
ExecStart=/usr/local/bin/k3s \\
    agent \\
\t'--kubelet-arg=cpu-manager-policy=static' \\
\t'--kubelet-arg=reserved-cpus=0-2' \\

"""


@pytest.mark.parametrize(
    ("files", "reserved"),
    [
        ({"var/lib/kubelet/config.yaml": "cpuManagerPolicy: static\nreservedSystemCPUs: '0'\n"}, "0"),
        (
            {
                "proc/40/cmdline": "/usr/local/bin/k3s agent\0",
                "proc/40/cgroup": "0::/system.slice/k3s-agent.service\n",
                "etc/systemd/system/k3s-agent.service": UNIT,
            },
            "0-2",
        ),
    ],
    ids=["kubelet", "k3s"],
)
async def test_be_work_runs_on_no_cpu_that_the_kubelet_reserves(
    live: LiveNode, files: dict[str, str], reserved: str
) -> None:
    for name, text in files.items():
        live.put(name, text)
    async with live.looked() as agent:
        directory = live.place().hierarchy.directory("cpuset", f"{group(BATCH)}/{container_id(BATCH)}")
        cpus = CpuSet.parse(live.kernel.read(directory, "cpuset.cpus").strip())
        assert agent.place.kubelet.reserved_cpus == CpuSet.parse(reserved)
    assert cpus
    assert not cpus & CpuSet.parse(reserved), f"BE runs on {cpus}"
