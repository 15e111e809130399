"""Every parser of what others write, with its documented errors and good inputs. `test_parsers` holds them to it.

A new public ``parse_*``, ``read_*`` or ``decode_*`` belongs here, or with its reason into `EXCEPTED`.
Longer than other modules because it is one table: what is missing in it is found by reading it as a whole.
"""

import struct
from functools import partial
from typing import Final

import msgpack
import msgspec

from cgroupfs import attribution, device_codecs, naming, threads
from cgroupfs.codecs import DeviceLimits, device_numbers
from cgroupfs.cpuset import CpuSet
from cgroupfs.errors import CgroupError, InputError, SourceError, StoreError
from cgroupfs.files import read_text
from cgroupfs.hierarchy import Hierarchy
from cgroupfs.knobs import CATALOG
from cgroupfs.pressure import has_sys_resource, parse_totals, read_pressure
from reconciler.actuators.network import netlink
from reconciler.cli import masks, recorded
from reconciler.cli.document import Unreachable, _parsed
from reconciler.cli.exits import CliError
from reconciler.cli.nodeview import read_number
from reconciler.cli.podsfile import read_pods_file
from reconciler.clients.http_config import read_line
from reconciler.clients.kubeconfig import read_kubeconfig
from reconciler.config import load, window_time
from reconciler.config.node_settings import decode_kept
from reconciler.control.effect_hours import load_effect
from reconciler.control.node_headroom import decode_note, read_published
from reconciler.control.owner_ledger import load_hours
from reconciler.control.persistence import decode_plan, encoded, read_classes, read_plan, read_unexamined
from reconciler.control.record import read_holds
from reconciler.headroom.peak_rows import decode_row, decode_workload, encode_row, encode_workload
from reconciler.headroom.peaks import Workload
from reconciler.headroom.report import read_kept as read_headroom
from reconciler.interference import recording
from reconciler.interference.engine import EngineState, _learned
from reconciler.interference.monitor import read_kept
from reconciler.placement.devices import read_pci_nodes
from reconciler.pods.resources import EXTENDED_SPEC, read_resources, with_extended
from reconciler.responses.eviction import journal
from reconciler.responses.means.config import NoticeConfig
from reconciler.responses.means.notice import parse_request
from reconciler.responses.means.processes import read_stat
from reconciler.settings import binder, units
from reconciler.settings.yaml import read_yaml
from reconciler.signals import (
    counter_delta,
    cpu,
    devicestats,
    fsuse,
    host_config,
    host_groups,
    host_processes,
    memory,
    nodeload,
    perf_abi,
    podcpu,
    podmemory,
    podnet,
    podnuma,
    pools,
    probe_source,
    promtext,
    runqueue,
    taskstats,
)
from reconciler.sources import bundles, kubelet_config, manifests, operator_file, runtime_files, runtime_roots
from reconciler.sources.kubelet_api import decode_pods
from resctrl import capability, groups, monitor, schemata
from state import kubelet, machine, reader, rows, topology_sysfs
from state.checkpoint import CheckpointError
from state.intents import read_intents
from state.mirror import read_copy
from state.model import ContainerMeta, Pools
from state.schema import seal, unseal
from tests.damaged.harness import (
    BYTES,
    ENTRY,
    JSON,
    OneRow,
    Parser,
    archive,
    binary_frame,
    feed_annotation,
    feed_checkpoint,
    feed_data,
    feed_decode,
    feed_dumped,
    feed_frame,
    feed_inside,
    feed_kinds,
    feed_kubelet,
    feed_ledger,
    feed_link,
    feed_node,
    feed_private,
    feed_queue,
    feed_recording,
    feed_rotten_key,
    feed_row,
    feed_spared,
    feed_status,
    feed_text,
    feed_tree,
    feed_unpacked,
    feed_usage,
    feed_wait,
    feed_wish,
    fixture,
    link_answer,
    of_json,
    of_text,
    on_file,
    one_text,
    pod_list,
    recorded_file,
    state_json,
    sysfs,
    wrapped,
)
from tests.fakes.marks import MARKS


def feed_peaks() -> bytes:
    """The row of one workload."""
    workload = Workload(0.0)
    for minute in range(5):
        workload.add(250.0 * minute, 5e8, 60.0 * minute)
    return encode_workload("ns/Deployment/web", workload, 300.0, known=True)


def _series(data: bytes) -> list[promtext.MetricSeries]:
    reader = promtext.SeriesReader(["a", "http_seconds_bucket"])
    reader.feed(data)
    reader.end()
    return reader.found


KUBECONFIG: Final = b"""apiVersion: v1
kind: Config
current-context: a
clusters:
- name: c
  cluster: {server: "https://10.0.0.1:6443", certificate-authority-data: "QQ=="}
users:
- name: u
  user: {client-certificate: /c.pem, client-key: /k.pem}
contexts:
- name: a
  context: {cluster: c, user: u}
"""
POD: Final = b"""apiVersion: v1
kind: Pod
metadata: {name: web, namespace: shop, uid: u-1, labels: {a: b}, annotations: {c: d}}
spec:
  priority: 5
  containers:
  - name: main
    resources: {requests: {cpu: 500m, memory: 1Gi}, limits: {cpu: 1}}
"""
CRUN: Final = (
    b'{"pid": 29503, "process-start-time": 3545541, "cgroup-path": "/kubepods/besteffort/pod1/c1", "scope": "", '
    b'"rootfs": "rootfs", "systemd-cgroup": false, "bundle": "/run/b", "created": "2026-11-23T04:15:25.977035Z"}'
)
OVERRIDES: Final = b"""overrides:
- {class: shared, pod: "payments/api-*", reason: latency}
- {class: reclaimed, labels: {matchLabels: {team: batch}, matchExpressions: [{key: a, operator: In, values: [b]}]}}
- {class: dedicated, uid: 6f1d0c5e-9d0c-4b63-9a3c-0a0f6d0b7a11}
"""
PODS: Final = b"""- {name: db, namespace: shop, class: dedicated, requests: {cpu: 4, memory: 8Gi}, limits: {cpu: 4}}
- {name: web, count: 3, requests: {cpu: 500m}, use: 300m}
- {name: crunch, labels: {koordinator.sh/qosClass: BE}}
"""
CRIO: Final = b"""[crio]
runroot = "/run/x"
storage_driver = "btrfs"
[crio.runtime.runtimes.crun]
runtime_root = "/run/crun2"
"""
CONTAINERD: Final = b"""version = 2
root = "/var/lib/containerd"
state = "/run/containerd"
imports = ["/etc/containerd/conf.d/*.toml"]
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
Root = "/run/runc"
"""
K3S_UNIT: Final = b"""[Service]
EnvironmentFile=-/etc/default/%N
ExecStart=/usr/bin/k3s \\
    server \\
\t'--kubelet-arg=reserved-cpus=0-1' \\

"""
EDGECORE: Final = b"""modules:
  edged:
    hostnameOverride: a
    rootDirectory: /b
    tailoredKubeletConfig: {reservedSystemCPUs: 0-1, port: 10250, cpuManagerPolicyOptions: {a: b}}
"""
KUBELET: Final = b"""kind: KubeletConfiguration
port: 10250
readOnlyPort: 0
address: 0.0.0.0
cgroupDriver: systemd
cgroupRoot: /a
cpuManagerPolicy: static
cpuManagerPolicyOptions: {full-pcpus-only: "true"}
reservedSystemCPUs: 0-1
staticPodPath: /etc/kubernetes/manifests
"""
MOUNTINFO: Final = b"""25 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 25 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - tmpfs tmpfs ro,mode=755
31 30 0:27 / /sys/fs/cgroup/cpu,cpuacct rw,nosuid shared:10 - cgroup cgroup rw,cpu,cpuacct
32 30 0:28 / /sys/fs/cgroup/cpuset\\040x rw,nosuid shared:11 - cgroup cgroup rw,cpuset
33 30 0:29 / /sys/fs/cgroup/memory rw,nosuid shared:12 - cgroup cgroup rw,memory
"""
PSI: Final = (
    b"some avg10=0.00 avg60=1.25 avg300=100.00 total=18446744073709551615\n"
    b"full avg10=0.00 avg60=0.00 avg300=0.00 total=0\n"
)
MEMINFO: Final = (
    b"MemTotal: 16316412 kB\nMemFree: 1 kB\nMemAvailable: 12316412 kB\n"
    b"SwapTotal: 0 kB\nSwapFree: 0 kB\nHugePages_Total: 0\n"
)
NUMA_STAT: Final = (
    b"hierarchical_anon=5 N0=5 N1=0\nhierarchical_file=5 N0=5 N1=0\nanon N0=5 N1=7\n"
    b"inactive_file N0=1\nactive_file N0=1\nfile_mapped N0=1\n"
)
ZONEINFO: Final = (
    b"Node 0, zone   Normal\n  pages free     5\n        min      1\n        low      2\n"
    b"        high     3\n        managed  9\n"
)
NODE_MEMINFO: Final = (
    b"Node 0 MemTotal: 16316412 kB\nNode 0 MemFree: 7 kB\nNode 0 Active(file): 7 kB\n"
    b"Node 0 Inactive(file): 7 kB\nNode 0 SReclaimable: 7 kB\n"
)
PID_STAT: Final = b"1 (x) S 1 1 1 0 -1 0 0 0 0 0 20 10 0 0 20 0 1 0 500 4096 7 0\n"
STAT: Final = b"cpu  1 2 3 4 5 6 7 8 9 10\ncpu0 1 2 3 4 5 6 7 8 9 10\ncpu1 1 2 3 4\nintr 5\n"
PROC_STAT: Final = b"7 (a) b (c)) S 1 7 7 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 12345 1 2 3\n"
CHECKPOINTS: Final = "kubelet/memory-static-device-allocated"
DEVICES: Final = fixture(f"{CHECKPOINTS}/kubelet_internal_checkpoint")
V1_CPU: Final = b'{"policyName":"static","defaultCpuSet":"0","entries":{"abc":"1-2"},"checksum":0}'
RETRY: Final = (b"120", b"Wed, 21 Oct 2026 07:28:00 GMT", b"Fri, 31 Dec 9999 23:59:59 +2359")
NODE_OBJECT: Final = (
    b'{"kind":"Node","metadata":{"name":"n","uid":"u","resourceVersion":"7"},'
    b'"spec":{"taints":[{"key":"k","effect":"NoSchedule"}]},'
    b'"status":{"conditions":[{"type":"Ready","status":"True","reason":"r","message":"m"}]}}'
)
TRAIL: Final = (
    b'{"kind":"Status","reason":"TooManyRequests","message":"m",'
    b'"details":{"retryAfterSeconds":9,"causes":[{"reason":"r"}]}}'
)
RECORDING: Final = recording.begin(recording.LearnedState(learned={})) + recording.RecordingWriter().block()
CAPTURED: Final = b'{"version":"1","node":"n","at":1.5,"files":3}'
POOLS: Final = encoded(
    Pools(
        online_cpus=CpuSet.span(4),
        reserved=CpuSet(),
        dedicated={"u/c": CpuSet([3])},
        shared=CpuSet([0, 1]),
        reclaimed=CpuSet([2]),
        budget_milli=500,
    )
)
ROWS: Final = (
    msgspec.msgpack.encode(ENTRY),
    b"\x80",
    msgpack.packb({"v": 1, "order": 3, "milli": {"0": 5, "x": 1}, "at": 1.0}),
)
VALUE: Final = (ValueError,)
CHECKPOINT: Final = (CheckpointError,)

PARSERS: Final[tuple[Parser, ...]] = (
    # cgroupfs
    on_file(
        "cgroupfs.hierarchy:Hierarchy.detect",
        "proc/self/mountinfo",
        lambda at: Hierarchy.detect(str(at)),
        (SourceError,),
        MOUNTINFO,
    ),
    *(
        of_text(
            feed_decode(name, version),
            VALUE,
            default.encode(),
            *more,
            name=f"cgroupfs.knobs:Knob.decode ({name}, v{version})",
        )
        for name, knob in CATALOG.items()
        for version, form in knob.forms.items()
        for default in (form.default,)
        for more in (
            {
                "io.max": (b"254:0 rbps=1048576 wbps=max riops=10 wiops=max\n8:0 rbps=max wbps=1 riops=max wiops=max",),
                "io.weight": (b"default 100\n8:0 50\n",),
                "io.latency": (b"8:0 target=5000",),
                "io.cost_qos": (
                    b"8:0 enable=1 ctrl=user rpct=95.00 rlat=5000 wpct=95.00 wlat=5000 min=50.00 max=150.00",
                ),
                "io.cost_model": (
                    b"8:0 ctrl=user model=linear rbps=1 rseqiops=2 rrandiops=3 wbps=4 wseqiops=5 wrandiops=6",
                ),
                "blkio.read_bps": (b"8:0 1048576\n8:16 5",),
                "cpu.cpus": (b"0-3,8",),
            }.get(name, ()),
        )
    ),
    of_text(
        lambda text: device_codecs.cost_row(text, model=False),
        VALUE,
        b"enable=1 ctrl=user rpct=95 rlat=5000 wpct=95 wlat=5000 min=50 max=150",
        name="cgroupfs.device_codecs:cost_row",
    ),
    of_text(
        lambda text: device_codecs.cost_row(text, model=True),
        VALUE,
        b"rbps=1 rseqiops=2 rrandiops=3 wbps=4 wseqiops=5 wrandiops=6",
        name="cgroupfs.device_codecs:cost_row (model)",
    ),
    of_text(device_numbers, VALUE, b"8:16"),
    of_text(CpuSet.parse, VALUE, b"0-3,8\n"),
    of_text(DeviceLimits.parse, VALUE, b"8:0 rbps=1048576 min=95.00; 8:16 ctrl=auto"),
    of_text(parse_totals, VALUE, PSI),
    of_text(has_sys_resource, (), b"CapEff:\t0000003fffffffff\n"),
    on_file(
        "cgroupfs.pressure:read_pressure",
        "cpu.pressure",
        lambda at: read_pressure(str(at / "cpu.pressure")),
        (SourceError, CgroupError, InputError),
        PSI,
    ),
    on_file("cgroupfs.files:read_text", "x", lambda at: read_text(str(at / "x")), (CgroupError,), b"max\n"),
    of_text(feed_usage, (), b"7\n", b"nr_periods 7\nusage_usec 8\n", name="cgroupfs.usage:UsageReader"),
    of_text(naming.parse, (), b"/kubepods/burstable/pod6f1d0c5e-9d0c-4b63-9a3c-0a0f6d0b7a11/abc"),
    of_text(naming.parse_container, (), b"cri-containerd-abc.scope"),
    of_text(attribution._unit, (), b"1:name=systemd:/a.service\n0::/a\n", name="cgroupfs.attribution:cgroup"),
    of_text(attribution._has_terminal, (), PROC_STAT, name="cgroupfs.attribution:stat"),
    # resctrl
    of_text(schemata.parse_schemata, (InputError,), b"    MB:0=100;1= 50\n    L3:0=fff;1=0ff\n"),
    *(
        sysfs(
            f"sys/fs/resctrl/{file}",
            capability.read_capability,
            "resctrl.capability:read_capability",
            good,
            errors=(InputError,),
        )
        for file, good in (
            ("schemata", b"    MB:0=100;1= 50\n    L3:0=fff;1=0ff\n"),
            ("info/L3/cbm_mask", b"fff\n"),
            ("info/L3/min_cbm_bits", b"1\n"),
            ("info/L3/shareable_bits", b"c00\n"),
            ("info/L3/sparse_masks", b"1\n"),
            ("info/L3_MON/mon_features", b"llc_occupancy\nmbm_total_bytes\n"),
        )
    ),
    sysfs(
        "proc/self/mountinfo",
        capability.read_capability,
        "resctrl.capability:read_capability",
        b"30 1 0:9 / /sys/fs/resctrl rw - resctrl resctrl rw,mba_MBps\n",
        errors=(InputError,),
    ),
    sysfs(
        "proc/cpuinfo",
        capability.read_capability,
        "resctrl.capability:read_capability",
        b"vendor_id : GenuineIntel\nflags\t\t: fpu rdt_a cat_l3\n",
        errors=(InputError,),
    ),
    of_text(
        lambda text: monitor.MonitorGroups("/r", one_text(text)).read("", at_s=1.0),
        (CgroupError,),
        b"4096\n",
        name="resctrl.monitor:MonitorGroups.read",
    ),
    of_text(threads.numbers, VALUE, b"1\n2\n"),
    of_text(
        lambda text: groups.members(one_text(text), "/r"),
        (CgroupError, InputError),
        b"1\n2\n",
        name="resctrl.groups:members",
    ),
    on_file("reconciler.cli.nodeview:number", "proc/x", lambda at: read_number(str(at), "/proc/x"), (), b"-5\n"),
    # state
    *(
        sysfs(
            f"sys/devices/system/{file}",
            topology_sysfs.read_topology,
            "state.topology_sysfs:read_topology",
            good,
            errors=(SourceError,),
        )
        for file, good in (
            ("cpu/online", b"0-1\n"),
            ("cpu/present", b"0-3\n"),
            ("cpu/isolated", b"1\n"),
            ("cpu/cpu0/topology/physical_package_id", b"0\n"),
            ("cpu/cpu0/topology/core_cpus_list", b"0-1\n"),
            ("cpu/cpu0/cpu_capacity", b"1024\n"),
            ("cpu/cpu0/cache/index3/level", b"3\n"),
            ("cpu/cpu0/cache/index3/id", b"3\n"),
            ("node/node0/cpulist", b"0-1\n"),
            ("node/node0/distance", b"10\n"),
            ("node/node0/meminfo", NODE_MEMINFO),
        )
    ),
    sysfs("sys/devices/system/cpu/online", topology_sysfs.read_online, "state.topology_sysfs:read_online", b"0-1\n"),
    of_text(
        machine.parse,
        (InputError,),
        b"2 sockets x 2 nodes x 8 cores x 2 threads; l3 per 4 cores; offline 3; isolated 4-7; memory 64G",
    ),
    of_json(
        kubelet.parse_cpu_manager_state,
        CHECKPOINT,
        fixture(f"{CHECKPOINTS}/cpu_manager_state"),
        fixture("kubelet/static-one-exclusive/cpu_manager_state"),
        V1_CPU,
    ),
    of_json(
        kubelet.parse_memory_manager_state, CHECKPOINT, fixture("kubelet/memory-static-exclusive/memory_manager_state")
    ),
    of_json(kubelet.parse_devices, CHECKPOINT, DEVICES, DEVICES.replace(b'{"0":["widget-0"]}', b'["widget-0"]')),
    of_json(
        kubelet.parse_allocations,
        CHECKPOINT,
        fixture("kubelet/inplace-1.27-one-pod/pod_status_manager_state"),
        rb'{"data":"{\"allocationEntries\":{\"pod1\":{\"container1\":{\"requests\":{\"cpu\":\"1Ki\"}}}}}","checksum":0}',
    ),
    Parser(
        "state.kubelet:parse_allocations (inside)",
        lambda data, _: kubelet.parse_allocations(wrapped(data)),
        CHECKPOINT,
        (
            b'{"allocationEntries":{"p":{"c":{"requests":{"cpu":"1"},"limits":{"cpu":"2"}}}},"resizeStatusEntries":{"p":"Deferred"}}',
            b'{"entries":{"p":{"ContainerResources":{"c":{"requests":{"cpu":"1"}}}}},"podList":"x"}',
        ),
        JSON,
    ),
    *(
        on_file(
            f"state.checkpoint:read_checkpoint ({name})",
            name,
            partial(feed_checkpoint, name, parse),
            CHECKPOINT,
            fixture(f"{CHECKPOINTS}/{name}"),
        )
        for name, parse in (
            ("cpu_manager_state", kubelet.parse_cpu_manager_state),
            ("memory_manager_state", kubelet.parse_memory_manager_state),
        )
    ),
    Parser(
        "state.rows:RowForm.decode",
        feed_data(rows.RowForm(OneRow, 1).decode),
        VALUE,
        (msgpack.packb({"v": 1, "texts": ["a"]}),),
        BYTES,
    ),
    Parser("state.schema:unseal", lambda data, _: unseal("k", data), VALUE, (seal("k", b"x"),), BYTES),
    Parser("state.ledger:Ledger", feed_row("cpu:/a:cpu.shares", feed_ledger), (), ROWS, BYTES),
    Parser("state.reader:read_dump", feed_dumped, (StoreError,), ROWS, BYTES),
    Parser("state.reader:read_dump (keys)", feed_rotten_key, (StoreError,), (b"a", b"\xff"), BYTES),
    on_file(
        "state.reader:read_dump (file)",
        "state.db",
        lambda at: reader.read_dump(str(at / "state.db")),
        (StoreError,),
        kind=BYTES,
    ),
    on_file(
        "state.reader:read_meta",
        "state.db",
        lambda at: reader.read_meta(str(at / "state.db"), "node_settings"),
        (StoreError,),
        kind=BYTES,
    ),
    Parser(
        "state.mirror:read_copy",
        feed_frame("state.db.copy", lambda at: read_copy(str(at / "state.db"))),
        (StoreError,),
        ROWS,
        BYTES,
    ),
    on_file(
        "state.mirror:read_copy (file)",
        "state.db.copy",
        lambda at: read_copy(str(at / "state.db")),
        (StoreError,),
        kind=BYTES,
    ),
    Parser(
        "state.intents:read_intents", feed_frame("writes", lambda at: read_intents(str(at / "writes"))), (), ROWS, BYTES
    ),
    on_file("state.intents:read_intents (file)", "writes", lambda at: read_intents(str(at / "writes")), (), kind=BYTES),
    # reconciler: rows
    Parser("reconciler.control.persistence:read_classes", feed_row("pod:1", read_classes), (), ROWS, BYTES),
    Parser("reconciler.control.persistence:decode_plan", feed_data(decode_plan), VALUE, (POOLS, *ROWS), BYTES),
    Parser("reconciler.control.persistence:read_plan", feed_row("pools", read_plan), (), ROWS, BYTES),
    Parser(
        "reconciler.control.persistence:read_unexamined",
        feed_row("unrecorded", read_unexamined),
        (),
        (msgpack.packb([["/kubepods/besteffort", 1]]),),
        BYTES,
    ),
    Parser(
        "reconciler.control.record:read_holds",
        feed_row("node", read_holds),
        (),
        (msgpack.packb({"target": "node", "reason": "r", "by": "b", "until": None}),),
        BYTES,
    ),
    Parser(
        "reconciler.control.node_headroom:decode_note",
        feed_data(decode_note),
        VALUE,
        (msgpack.packb({"target": "node", "node": "n1"}),),
        BYTES,
    ),
    Parser("reconciler.control.node_headroom:read_published", feed_row("published", read_published), (), ROWS, BYTES),
    Parser(
        "reconciler.config.node_settings:decode_kept",
        feed_data(decode_kept),
        (),
        (msgpack.packb({"v": 1, "source": "koordinator", "node": "n1", "objects": []}),),
        BYTES,
    ),
    Parser("reconciler.interference.monitor:read_kept", feed_row("interference", read_kept), (), ROWS, BYTES),
    Parser("reconciler.control.owner_ledger:load_hours", feed_row("owners:480000", load_hours), (), ROWS, BYTES),
    Parser("reconciler.control.effect_hours:load_effect", feed_row("effect:480000", load_effect), (), ROWS, BYTES),
    Parser("reconciler.headroom.report:read_kept", feed_row("headroom", read_headroom), (), ROWS, BYTES),
    Parser(
        "reconciler.headroom.peak_rows:decode_row",
        feed_data(decode_row),
        VALUE,
        (encode_row("b", 5.0, 1e9, (feed_peaks(),)),),
        BYTES,
    ),
    Parser(
        "reconciler.headroom.peak_rows:decode_workload",
        feed_data(partial(decode_workload, at_s=9.0)),
        VALUE,
        (feed_peaks(),),
        BYTES,
    ),
    Parser("reconciler.actuators.codec:read_rows", feed_text(feed_kinds), (), (b"7", b"L3:0=fff", b"slot 3", b"0x1f")),
    Parser(
        "state.schema2:convert",
        feed_data(feed_private),
        (),
        (
            msgpack.packb({"boot": "b", "values": {"vm.x": {"original": 1, "ours": [2]}}}),
            msgpack.packb({"boot": "b", "ours": {7: "online"}}),
            msgpack.packb({"boot": "b", "groups": True, "place": "/", "original": {"L3": {0: 1}}, "written": []}),
            msgpack.packb(
                {"boot": "b", "roots": {"e": ""}, "cables": {"v": {"index": 1, "pod_uid": "", "made": True}}}
            ),
            msgpack.packb({"boot": "b", "containers": {"/a": {"pod_uid": "", "inode": 1, "ours": [1], "original": 0}}}),
        ),
        BYTES,
    ),
    Parser(
        "reconciler.responses.eviction.journal:cases_of",
        lambda data, _: journal.cases_of([("1", data)]),
        (),
        ROWS,
        BYTES,
    ),
    Parser("reconciler.alerts.dispatcher:DurableQueue.load", feed_row("alert:1", feed_queue), (), ROWS, BYTES),
    Parser(
        "reconciler.interference.engine:learned",
        lambda data, _: _learned(
            EngineState(learned={"cpi": {"k": msgspec.Raw(data)}, "ewma": {"k": msgspec.Raw(data)}})
        ),
        (),
        ROWS,
        BYTES,
    ),
    # reconciler: runtime and kubelet
    of_json(
        lambda data: bundles.parse_bundle(data, "c"),
        (InputError,),
        fixture("runtime/guaranteed-int-node1.SANDBOX.config.json"),
        b'{"ociVersion":"1.0","annotations":{"io.kubernetes.cri-o.Labels":"{\\"a\\":\\"b\\"}"},"linux":{"cgroupsPath":"/a/b","resources":{"cpu":{"shares":2},"memory":{"limit":4},"pids":{"limit":1}}}}',
        name="reconciler.sources.bundles:parse_bundle",
    ),
    of_json(bundles.parse_state, (InputError,), state_json()),
    on_file(
        "reconciler.sources.bundles:read_bundle",
        "config.json",
        lambda at: bundles.read_bundle(str(at)),
        (InputError, SourceError),
        b'{"ociVersion":"1.0"}',
    ),
    of_json(partial(decode_pods, marks=MARKS), VALUE, pod_list(), name="reconciler.sources.kubelet_api:decode_pods"),
    on_file(
        "reconciler.sources.kubelet_config:read_kubelet_config",
        "config.yaml",
        feed_kubelet,
        (),
        KUBELET,
        *(
            b"reservedSystemCPUs: 0\n" + key + b": " + value
            for key in (b"port", b"cpuManagerPolicyOptions")
            for value in (b"{a: b}", b"[1]", b"1.5", b"~")
        ),
    ),
    on_file(
        "reconciler.sources.kubelet_config:cmdline",
        "proc/7/cmdline",
        lambda at: kubelet_config.read_kubelet_config(str(at)),
        (),
        b"/usr/bin/kubelet\0--port=5\0--config\0/x\0",
    ),
    *(
        on_file(f"reconciler.sources.kubelet_arguments:{name}", place, feed_inside(words), (), good)
        for name, place, words, good in (
            ("k3s_unit", "etc/systemd/system/k3s.service", b"/usr/bin/k3s server\0", K3S_UNIT),
            (
                "k3s_environment",
                "etc/default/k3s",
                b"/usr/bin/k3s server\0",
                b"K3S_NODE_NAME='a b'\nK3S_CONFIG_FILE=/c\n",
            ),
            (
                "k3s_config",
                "etc/rancher/k3s/config.yaml",
                b"k3s\0server\0-v=2\0",
                b"kubelet-arg+:\n- reserved-cpus=0\n",
            ),
            (
                "args_file",
                "var/snap/microk8s/current/args/kubelet",
                b"kubelite\0",
                b"--root-dir=${SNAP_COMMON}/a\n--v=2\n",
            ),
            ("edgecore", "etc/kubeedge/config/edgecore.yaml", b"edgecore\0", EDGECORE),
        )
    ),
    on_file(
        "reconciler.sources.runtime_roots:find_runtime_dirs",
        "etc/containerd/config.toml",
        lambda at: runtime_roots.find_runtime_dirs(str(at)),
        (),
        CONTAINERD,
    ),
    on_file(
        "reconciler.sources.runtime_roots:find_image_root",
        "etc/containerd/config.toml",
        lambda at: runtime_roots.find_image_root(str(at)),
        (),
        CONTAINERD,
    ),
    on_file(
        "reconciler.sources.runtime_roots:find_runtime_dirs",
        "etc/crio/crio.conf",
        lambda at: runtime_roots.find_runtime_dirs(str(at)),
        (),
        CRIO,
    ),
    on_file(
        "reconciler.clients.kubeconfig:read_kubeconfig",
        "kubeconfig",
        lambda at: read_kubeconfig("/kubeconfig", name="api", root=str(at)),
        (InputError, SourceError),
        KUBECONFIG,
    ),
    of_json(feed_status, (), TRAIL, name="reconciler.clients.kube:status_of"),
    of_json(feed_node, (SourceError,), NODE_OBJECT, name="reconciler.clients.node_object:NodeClient.read"),
    of_text(feed_wait, (), *RETRY, name="reconciler.clients.http:retry_after_s"),
    Parser(
        "reconciler.clients.http:retry_after_s (latin-1)", lambda data, _: feed_wait(data.decode("latin-1")), (), RETRY
    ),
    Parser("reconciler.actuators.network.netlink:Links", feed_data(feed_link), (SourceError,), (link_answer(),), BYTES),
    # reconciler: people's files
    of_text(
        lambda text: read_yaml(text, "x"),
        (InputError,),
        POD,
        b"a: &a [1]\nb: *a\n<<: {c: d}\n",
        name="reconciler.settings.yaml:read_yaml",
    ),
    of_text(feed_tree, (), POD, name="reconciler.settings.yaml:parse_tree"),
    of_text(
        lambda text: operator_file.read_overrides(text, "x"),
        (binder.ConfigError,),
        OVERRIDES,
        name="reconciler.sources.operator_file:read_overrides",
    ),
    on_file(
        "reconciler.sources.operator_file:OperatorFile.read",
        "rules.yaml",
        lambda at: operator_file.OperatorFile("/rules.yaml", str(at)).read(),
        (),
        OVERRIDES,
    ),
    of_text(
        lambda text: manifests.read_manifest(text, "x", MARKS),
        (InputError,),
        POD,
        name="reconciler.sources.manifests:read_manifest",
    ),
    of_json(
        lambda text: runtime_files.parse_record(text, f"/run/crun/{'c' * 64}/status"),
        (InputError,),
        CRUN,
        name="reconciler.sources.runtime_files:parse_record",
    ),
    on_file(
        "reconciler.sources.runtime_files:read_record",
        f"{'c' * 64}/status",
        lambda at: runtime_files.read_record(f"{at}/{'c' * 64}/status"),
        (SourceError, InputError),
        CRUN,
    ),
    on_file(
        "reconciler.sources.manifests:ManifestDirectory.read",
        "m/pod.yaml",
        lambda at: manifests.ManifestDirectory("/m", MARKS, str(at)).read(),
        (SourceError,),
        POD,
    ),
    on_file(
        "reconciler.config.load:load",
        "config.yaml",
        lambda at: load.load(str(at / "config.yaml")),
        (binder.ConfigError,),
        b"mode: observe\nclasses:\n  overrides: []\n",
    ),
    on_file(
        "reconciler.cli.podsfile:read_pods_file",
        "pods.yaml",
        lambda at: read_pods_file(str(at / "pods.yaml"), MARKS),
        (InputError, binder.ConfigError),
        PODS,
        b'{"kind":"List","items":[{"metadata":{"name":"a","uid":"u"}}]}',
    ),
    on_file(
        "reconciler.clients.http_config:read_line",
        "token",
        lambda at: read_line("/token", str(at)),
        VALUE,
        b"Bearer x\n",
    ),
    recorded_file(recorded.ABOUT, CAPTURED),
    recorded_file(recorded.KUBELET_PODS, pod_list()),
    recorded_file(
        recorded.CRI,
        b'{"version":{"version":"0.1.0","name":"containerd","api":"v1"},"pods":[{"uid":"u","source":"cri"}]}',
    ),
    recorded_file(recorded.USAGE, b'[{"at":1.0,"stat":"cpu0 1","pods":{"u":5}}]'),
    on_file("reconciler.cli.plan:archive", "x.tar.gz", feed_unpacked, (CliError,), archive(), kind=BYTES),
    Parser("reconciler.interference.recording:read", feed_data(feed_recording), (InputError,), (RECORDING,), BYTES),
    Parser(
        "reconciler.cli.document:answer",
        lambda data, _: _parsed("/s", data),
        (Unreachable,),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}",),
    ),
    *(
        Parser(f"reconciler.cli.masks:{call.__name__}", feed_text(call), VALUE, (good,), JSON)
        for call, good in (
            (masks.mask_json_text, TRAIL),
            (masks.mask_pods_text, pod_list()),
            (masks.mask_bundle_text, b'{"ociVersion":"1","annotations":{"a":"b"},"linux":{"cgroupsPath":"/a"}}'),
            (masks.mask_devices, DEVICES),
            (masks.mask_allocations, wrapped(b'{"allocationEntries":{}}')),
        )
    ),
    *(
        of_text(call, VALUE, good, name=f"reconciler.cli.masks:{call.__name__}")
        for call, good in (
            (masks.mask_yaml_text, POD),
            (masks.mask_config_text, KUBELET),
            (masks.mask_toml_text, b'version = 2\nstate = "/run/x"\n'),
            (masks.mask_own_config, b"alerts: {}\nmode: observe\n"),
        )
    ),
    # reconciler: numbers and words
    of_text(units.parse_quantity, VALUE, b"100m", b"4Gi", b"1e3", b"0.5"),
    of_text(window_time.parse_when, VALUE, b"weekdays 09:00-20:00 Europe/Berlin", b"fri-mon,wed 22:00-06:00"),
    of_text(
        lambda text: units.parse_number(text, units.SECONDS, whole=False),
        VALUE,
        b"200ms",
        b"5m",
        name="reconciler.settings.units:parse_number",
    ),
    of_text(
        lambda text: read_resources("x", {"cpu": text, "memory": text}),
        (),
        b"4Gi",
        name="reconciler.pods.resources:read_resources",
    ),
    of_json(
        lambda data: with_extended((ContainerMeta(name="main"),), {EXTENDED_SPEC: data.decode("utf-8", "replace")}),
        (),
        b'{"containers":{"main":{"requests":{"kubernetes.io/batch-cpu":"500","kubernetes.io/batch-memory":1}}}}',
        name="reconciler.pods.resources:with_extended",
    ),
    of_json(
        lambda data: feed_annotation(data.decode("utf-8", "surrogateescape")),
        (),
        b'{"cpus":"0-3"}',
        name="reconciler.pods.annotations:JsonAnnotation",
    ),
    *(
        of_json(partial(feed_wish, name), (), good, name=f"reconciler.pods.cpu_annotations:parse ({name})")
        for name, good in (
            ("katalyst.kubewharf.io/cpu_enhancement", b'{"numa_number":"2","cpuset_pool":"a"}'),
            ("katalyst.kubewharf.io/memory_enhancement", b'{"numa_binding":"true","numa_exclusive":"true"}'),
            ("scheduling.koordinator.sh/resource-status", b'{"cpuset":"0-3","numaNodeResources":[{"node":0}]}'),
            ("scheduling.koordinator.sh/resource-spec", b'{"preferredCPUBindPolicy":"FullPCPUs"}'),
        )
    ),
    of_text(feed_spared, (), b'["evictLoad"]', name="reconciler.responses.eviction.exemptions:policy_allows"),
    # reconciler: signals
    of_text(cpu.parse_stat, VALUE, STAT),
    of_text(
        podnet.parse_net_dev, (), b"Inter-|\n face |b\n  eth0: 1 2 3 4 5 6 7 8 9 10 11\n    lo:1 2 3 4 5 6 7 8 9\n"
    ),
    of_text(nodeload.parse_loadavg, VALUE, b"0.20 0.18 0.12 1/80 11206\n"),
    of_text(memory.parse_node_meminfo, VALUE, NODE_MEMINFO),
    of_text(podcpu.parse_cpu_stat, (), b"usage_usec 5\nnr_periods 7\nnr_throttled 2\nthrottled_usec 3\n"),
    *(
        of_text(
            partial(call, version=version, page_bytes=4096),
            VALUE,
            NUMA_STAT,
            name=f"reconciler.signals.podnuma:{call.__name__} (v{version})",
        )
        for call in (podnuma.parse_numa_stat, podnuma.parse_numa_cache)
        for version in (1, 2)
    ),
    of_text(devicestats.parse_diskstats, (), b"   8       0 sda 1 2 3 4 5 6 7 8 9 10 11\n"),
    of_text(devicestats.parse_io_stat, (), b"8:0 rbytes=1 wbytes=2 rios=3 wios=4 dbytes=0 dios=0\n"),
    of_text(devicestats.parse_blkio, (), b"8:0 Read 5\n8:0 Write 6\nTotal 11\n"),
    of_text(fsuse.parse_du, (), b"5\t/a\n"),
    of_text(fsuse.upper_directory, (), b"5 4 0:1 / / rw - overlay overlay rw,lowerdir=/a,upperdir=/b,workdir=/c\n"),
    of_text(memory.parse_meminfo, VALUE, MEMINFO),
    of_text(memory.parse_zoneinfo, VALUE, ZONEINFO),
    of_text(pools.parse_schedstat, VALUE, b"version 15\ncpu0 1 2 3 4 5 6 7 8 9\n"),
    *(
        of_text(
            partial(podmemory.parse_memory_stat, version=version),
            (),
            b"anon 5\npgscan 7\ntotal_rss 5\nhierarchical_memory_limit 9223372036854771712\nworkingset_refault 3\n",
            name=f"reconciler.signals.podmemory:parse_memory_stat (v{version})",
        )
        for version in (1, 2)
    ),
    of_text(host_config.parse_match, VALUE, b"cgroup:/a/b-*"),
    of_text(host_processes.parse_process_stat, VALUE, PID_STAT),
    of_text(host_processes.parse_process_status, VALUE, b"Name:\tx\nUid:\t7\t7\t7\t7\nCpus_allowed_list:\t0-3\n"),
    of_text(
        lambda text: host_processes.parse_passwd(text, "ci"),
        (),
        b"root:x:0:0::/:\nci:x:1001:1001::/:\n",
        name="reconciler.signals.host_processes:parse_passwd",
    ),
    of_text(
        lambda text: host_processes.parse_subuid(text, {"ci"}),
        (),
        b"ci:100000:65536\n1001:200000:10\n",
        name="reconciler.signals.host_processes:parse_subuid",
    ),
    of_json(host_groups.read_docker_container, VALUE, b'{"Name":"/web","Config":{"Labels":{"app":"web"}}}'),
    of_text(runqueue.parse_schedstat, VALUE, b"1 2 3\n"),
    of_text(
        lambda text: counter_delta.parse_counters(text, ("\na ", "\nb ")),
        (),
        b"a 5\nb 6\n",
        name="reconciler.signals.counter_delta:parse_counters",
    ),
    of_text(
        lambda text: parse_request(NoticeConfig(), text),
        (),
        b"volume:notice",
        name="reconciler.responses.means.notice:parse_request",
    ),
    of_text(promtext.parse_selector, VALUE, b'http_seconds_bucket{job="a",path=~"/api.*"}'),
    of_json(_series, VALUE, b'{"a":1}', name="reconciler.signals.promtext:SeriesReader"),
    Parser(
        "reconciler.signals.promtext:SeriesReader (text)",
        lambda data, _: _series(data),
        VALUE,
        (b'# HELP\nhttp_seconds_bucket{le="0.5",a="b\\"c"} 12 1234\na 5\n',),
    ),
    Parser(
        "reconciler.signals.taskstats:parse_answer",
        feed_data(taskstats.parse_answer),
        (ValueError, OSError),
        (binary_frame(24), binary_frame(2)),
        BYTES,
    ),
    Parser(
        "reconciler.signals.perf_abi:decode",
        lambda data, _: perf_abi.decode(data, 2),
        (),
        (struct.pack("=5Q", 2, 5, 5, 1, 2),),
        BYTES,
    ),
    of_json(
        lambda data: probe_source.number_in(data, "latency.0.p99"),
        VALUE,
        b'{"latency":[{"p99":5.5}]}',
        name="reconciler.signals.probe_source:number_in",
    ),
    Parser(
        "reconciler.signals.probe_source:number_in (plain)",
        lambda data, _: probe_source.number_in(data, None),
        VALUE,
        (b"5.5\n",),
    ),
    on_file(
        "reconciler.responses.means.processes:read_stat", "7/stat", lambda at: read_stat(7, str(at)), (), PROC_STAT
    ),
    on_file(
        "reconciler.placement.devices:read_pci_nodes",
        "sys/bus/pci/devices/0000:00:01.0/numa_node",
        lambda at: read_pci_nodes({"0000:00:01.0"}, str(at)),
        (),
        b"1\n",
    ),
    on_file(
        "reconciler.actuators.network.netlink:link_mbit",
        "eth0/speed",
        lambda at: netlink.link_mbit("eth0", str(at)),
        (),
        b"10000\n",
    ),
)

TAKE_PIPES: Final = frozenset({"reconciler.cli.podsfile:read_pods_file"})
"""Named on the command line, where a person may give the output of another program."""
EXCEPTED: Final = {
    r"cgroupfs\.bounded:read_(file|open)": "what bounds the others; tests/cgroupfs/test_bounded.py",
    r"cgroupfs\.(files|kept|trial):\w+\.read": "the text alone; what reads it is here",
    r"reconciler\.cli\.archive:ArchivedControls\.read": "the text alone; here as archive",
    r"cgroupfs\.naming:(Layout\.parse|detect_layout)": "names of directories, by naming:parse",
    r"cgroupfs\.usage:UsageReader\.read(_cpu)?": "here as UsageReader",
    r"state\.checkpoint:load": "by each of the formats",
    r"state\.framed:read": "the bytes alone; by read_copy and read_intents",
    r"state\.reader:read_(history|tables)": "with read_dump",
    r"reconciler\.clients\.(http:HttpSession|kube:KubeApi)\.read": "hands on what arrives",
    r"reconciler\.config\.read_keys:read_keys": "goes through our own configuration",
    r"reconciler\.runtime\.streams:Parser\.parse_args": "the user's own words; tests/reconciler/cli",
    r"reconciler\.runtime\.safe_files:read_file": "the bytes alone; tests/reconciler/runtime/test_safe_files.py",
    r"reconciler\.sources\.pod_list:read_pod": "by kubelet_api:decode_pods",
    r"reconciler\.actuators\.network\.tc:load_(classifier|program)": "loads a program of ours into the kernel",
    r"reconciler\.actuators\.codec:ValueAccess\.read": "a protocol",
    r"reconciler\.actuators\.files\.interrupts:InterruptFiles\.read": "the kernel's list of CPUs, by CpuSet.parse",
    r"reconciler\.actuators\.files\.node_files:\w+\.(read|value)": "a number, ValueError is caught there",
    r"reconciler\.pods\.annotations:(JsonAnnotation\.read|read_plain)": "here as JsonAnnotation and wish_of",
    r"reconciler\.actuators\.cgroup\.(decide:ChangeDetector\.detect|control_files:ControlFileCache\.load)": "no text",
    r"reconciler\.actuators\.cgroup\.(control_files:\w+\.read_again|inner_groups:Inside\.read)": "by the knobs' codecs",
    r"reconciler\.clients\.grpc:parse_status": "two header fields; tests/reconciler/clients/test_grpc.py",
    r"reconciler\.responses\.eviction\.limits:load_history": "takes what was decoded",
    r"reconciler\.responses\.means\.api:parse_reply": "by kube:status_of",
    r"reconciler\.control\.hour_rows:load_rows": "by load_hours and load_effect",
    r"reconciler\.cli\.limits:read_value": "the text alone",
    r"reconciler\.cli\.windowed:load_now": "by reconciler.config.load:load",
    r"reconciler\.cli\.nodeview:read_(text|number)": "here as nodeview",
    r"reconciler\.cli\.archive:unpack": "here as archive",
    r"reconciler\.daemon\.sources:OperatorFiles\.read_manifests": "by ManifestDirectory.read",
    r"reconciler\.config\.environment:read_kubelet": "by read_kubelet_config",
    r"reconciler\.actuators\.memory_reclaim\.actuator:ReclaimActuator\.read": "several files, by their parsers",
    r"reconciler\.placement\.chain:load": "a name in our own table",
    r"reconciler\.runtime\.lazy:load": "a name in our own table, or of a plugin: tests/reconciler/runtime",
    r"reconciler\.responses\.eviction\.journal:EvictionJournal\.load": "by cases_of",
    r"reconciler\.signals\.\w+:\w+\.read": "readers of signals: their parsers are here",
    r"reconciler\.sources\.allocations:Allocations\.read": "takes what was parsed",
    r"reconciler\.sources\.checkpoints:CheckpointSource\.read_all": "by the checkpoints' parsers",
    r"reconciler\.sources\.kubelet_config:parse_flags": "here as cmdline",
    r"reconciler\.web\.app:read_app": "the read-only part of the web interface",
}
"""Names (patterns) that look like a parser's, and why they are not tried under them."""
