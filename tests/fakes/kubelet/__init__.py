"""The one fake kubelet of the tests: what bypassd can see of a kubelet, each part by itself or all together.

========================  ===========================================================================================
module                    imitates
========================  ===========================================================================================
`fake.FakeKubelet`        the whole: admits and removes pods, checkpoints, config.yaml, QoS weights, reconcile ticks
`api.KubeletApi`          the read-only ``/pods`` on loopback, and seven ways in which it fails
`cpu_manager.CpuManager`  the CPU manager's policies ``none`` and ``static`` and its checkpoint, byte for byte
`cgroups.KubeletCgroups`  the kubepods tree on the real kernel: cgroup v1 and v2, ``cgroupfs`` and ``systemd`` names
========================  ===========================================================================================

Imitated versions: kubelets 1.22 to 1.27 by recordings (pod list, checkpoints, order of directories and values); 1.21
as a 1.22 without its "skip if unchanged"; ``allocated_pods_state`` as from 1.34 on.

Not imitated: HTTPS, authentication and ``/configz`` (tests of the client use `tests.fakes.http_peer`, which answers
with any bytes); the topology manager; the memory manager's decisions (only its recorded checkpoints); probes, volumes,
eviction, and the API server.
"""
