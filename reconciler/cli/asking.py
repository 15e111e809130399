"""Live queries of kubelet, runtime, daemon, and the kernel's fanotify; results or refusals."""

import json
import os
import re
from collections.abc import Mapping
from typing import Final

import trio
from msgspec import Struct

from cgroupfs.attribution import FanotifyWatch
from cgroupfs.errors import AgentError, SourceError
from cgroupfs.pressure import PressureResource, node_pressure_file, try_trigger
from reconciler.cli.document import Denied, Unreachable, exchange
from reconciler.cli.nodeview import InspectedNode, marks_of, read_number, read_text
from reconciler.clients.api_identity import find_peer, own_identity
from reconciler.clients.command import Command
from reconciler.clients.endpoint import HttpEndpoint
from reconciler.clients.http import HttpResponse, HttpSession
from reconciler.clients.kube import KubeApi, status_of, words_of
from reconciler.clients.kube_config import ApiServer
from reconciler.clients.token_life import TokenLife, life_of, token_of
from reconciler.config.environment import api_client, cri_client, cri_socket, kubelet_peer, node_name
from reconciler.pods.marks import MarkReader
from reconciler.runtime.safe_files import check_program
from reconciler.signals.perf_abi import CACHE_MISSES, CYCLES, INSTRUCTIONS, RealPerf
from reconciler.signals.perf_window import probe
from reconciler.signals.taskstats import Taskstats
from reconciler.sources.cri import CriClient, RuntimeCondition, RuntimeVersion
from reconciler.sources.kubelet_api import decode_pods
from reconciler.sources.pressure_events import SPEC
from state.closing import NodeMark
from state.eviction import EvictionMethodName
from state.model import PodMeta

_PROGRAM_S: Final = 5.0
_VERSION_BYTES: Final = 4096
_API_S: Final = 3.0
_REVIEWS: Final = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
_VERSION: Final = re.compile(r"v(\d{1,4})\.(\d{1,4})\.(\d{1,4})[A-Za-z0-9.+-]{0,64}")


class QueryResults(Struct, kw_only=True):
    """The results. A None with an empty problem was not queried (a copied node, or no peer)."""

    kubelet_version: str | None = None
    kubelet_url: str | None = None
    kubelet_body: bytes | None = None
    kubelet_pods: tuple[PodMeta, ...] = ()
    kubelet_problem: str = ""
    cri_socket: str | None = None
    cri_version: RuntimeVersion | None = None
    cri_conditions: tuple[RuntimeCondition, ...] = ()
    cri_pods: tuple[PodMeta, ...] = ()
    cri_problem: str = ""
    daemon: str | None = None
    daemon_reasons: tuple[str, ...] = ()
    daemon_pid: int | None = None
    daemon_state: Mapping[str, object] | None = None
    """What the running daemon uses: the section ``agent`` of its document; None: not queried, or no answer."""
    daemon_problems: tuple[str, ...] = ()
    """What the running daemon lists as problems of the node and its pods."""
    fanotify: bool | None = None
    fanotify_problem: str = ""
    api_problem: str | None = None
    """Why evictions cannot use the API server; empty: they can; None: not queried."""
    mark_problem: str | None = None
    """Why a closed node's object cannot be marked; empty: it can; None: not queried."""
    taskstats_problem: str | None = None
    perf_problem: str | None = None
    pressure_window_s: float | None = None
    """The window of a trigger on the node's memory pressure; None: not tried, or refused."""
    pressure_problem: str | None = None
    """Why the kernel refuses a trigger; None: not tried."""


def query_node(node: InspectedNode) -> QueryResults:
    """Query all at once; takes no longer than the slowest deadline. Never raises."""
    results = QueryResults()
    if node.copied:
        return results
    _ask_kernel(node, results)
    if node.config.interference.enabled or node.config.eviction.enabled:
        results.taskstats_problem, results.perf_problem = _taskstats_problem(), _perf_problem()
        results.pressure_window_s, results.pressure_problem = _pressure_trigger(node)
    _ask_daemon(node, results)
    marks = marks_of(node.config)
    identity = own_identity(node.config.apiserver, root=node.root)
    peer = kubelet_peer(node.config.kubelet, node.kubelet, identity)
    results.cri_socket = cri_socket(node.config.runtime, node.kubelet, node.root)
    eviction = node.config.eviction
    by_api = eviction.enabled and EvictionMethodName.API in eviction.means.order
    closes = eviction.enabled and node.config.closing.enabled and node.config.closing.mark is not NodeMark.NONE

    async def ask() -> None:
        async with trio.open_nursery() as nursery:
            if by_api:
                nursery.start_soon(ask_api, node, results)
            if closes:
                nursery.start_soon(_ask_mark, node, results)
            if peer is not None:
                nursery.start_soon(_ask_kubelet, peer, marks, results)
            if (client := cri_client(node.config.runtime, node.kubelet, node.root, marks)) is not None:
                nursery.start_soon(_ask_runtime, client, results)
            nursery.start_soon(_ask_version, node, results)

    trio.run(ask)
    return results


async def _ask_kubelet(peer: HttpEndpoint, marks: MarkReader, results: QueryResults) -> None:
    results.kubelet_url = peer.shown
    try:
        async with HttpSession(peer) as session:
            results.kubelet_body = await session.get("/pods")
        results.kubelet_pods, problems = decode_pods(results.kubelet_body, marks)
        results.kubelet_problem = "; ".join(problems)
    except (SourceError, ValueError) as exc:
        results.kubelet_problem = str(exc)


async def _ask_version(node: InspectedNode, results: QueryResults) -> None:
    """Version that the verified kubelet's program prints.

    The file at its path is run, never the target of /proc.
    """
    path, program = node.kubelet.executable, node.kubelet.program
    # Only root may run it as another user.
    if path is None or os.geteuid() != 0:
        return
    try:
        # Only root can change or replace it, and it is the file that the kubelet runs.
        status = check_program(path)
        if (status.st_dev, status.st_ino) == program:
            results.kubelet_version = await _program_version(path)
    except OSError:
        return  # a kubelet in a container has its program elsewhere: its version is not known


async def _program_version(path: str) -> str | None:
    """``v1.22.17``. Errors: `OSError` when it cannot be run."""
    done = await Command([path, "--version"], user="nobody", most_output=_VERSION_BYTES).run(_PROGRAM_S)
    match = _VERSION.search(done.output.decode(errors="replace"))
    return match[0] if match and not done.problem else None


async def _ask_runtime(client: CriClient, results: QueryResults) -> None:
    async with client:
        try:
            results.cri_version = await client.version()
            results.cri_conditions = await client.status()
            results.cri_pods = await client.pods()
        except SourceError as exc:
            results.cri_problem = str(exc)


def _ask_daemon(node: InspectedNode, results: QueryResults) -> None:
    if node.socket is None:
        return
    try:
        _, body = exchange(node.socket, "GET", "/readyz", timeout_s=2.0)
        answer = json.loads(body)
        results.daemon = "ready" if answer["ready"] else "not ready"
        results.daemon_reasons = tuple(answer["reasons"])
        results.daemon_pid = _daemon_pid(node)
        _, body = exchange(node.socket, "GET", "/state?section=agent,problems", timeout_s=2.0)
        document = json.loads(body)
        state, problems = document["agent"], document.get("problems")
        results.daemon_state = state if isinstance(state, dict) else None
        results.daemon_problems = tuple(map(str, problems)) if isinstance(problems, list) else ()
    except Unreachable as exc:
        # One that is hung or stopped (SIGSTOP) has the socket and the lock all the same.
        reasons = (f"a daemon runs and does not answer: {exc.why}",) if exc.silent else ()
        results.daemon, results.daemon_reasons = None, reasons
    except Denied as exc:
        results.daemon_reasons = (str(exc),)
    except (ValueError, KeyError, TypeError):
        results.daemon_reasons = (f"the answer on {node.socket} is not from bypassd",)


def _daemon_pid(node: InspectedNode) -> int | None:
    """The daemon that answers, by its lock; None where its number is of a PID namespace of its own."""
    pid = read_number("/", os.path.join(os.path.dirname(node.store), "lock"))
    # One file, for which psutil is not imported. Arguments are separated by zero bytes.
    command = None if pid is None else read_text("/", f"proc/{pid}/cmdline")
    return pid if command is not None and "bypassd" in command else None


def _ask_kernel(node: InspectedNode, results: QueryResults) -> None:
    """Open a fanotify group and mark the hierarchies: the only reliable test."""
    if node.hierarchy is None:
        return
    try:
        watch = FanotifyWatch([mount.directory for mount in node.hierarchy.mounts()])
    except SourceError as exc:
        results.fanotify, results.fanotify_problem = False, str(exc)
        return
    results.fanotify, results.fanotify_problem = True, watch.problem or ""
    watch.close()


async def ask_api(node: InspectedNode, results: QueryResults) -> None:
    """Whether bypassd could evict a pod: a review of rights, which changes nothing."""
    async with api_client(node.config, node.kubelet) as api:
        results.api_problem = await denied(api, "create", "pods/eviction", timeout_s=_API_S)


async def _ask_mark(node: InspectedNode, results: QueryResults) -> None:
    """Whether bypassd could mark this node's object, by a review of rights."""
    resource = "nodes/status" if node.config.closing.mark is NodeMark.CONDITION else "nodes"
    wanted = (("get", "nodes"), ("patch", resource))
    name = node_name(node.kubelet)
    async with api_client(node.config, node.kubelet) as api:
        problems = [await denied(api, verb, kind, timeout_s=_API_S, name=name) for verb, kind in wanted]
    results.mark_problem = next(filter(None, problems), "")


def token_life(node: InspectedNode, config: ApiServer) -> TokenLife | None:
    """The life of the token for the API server, as it says itself; None where it says nothing. No request is sent."""
    try:
        token = token_of(find_peer(config, root=node.root, kubelets=node.kubelet.kubeconfig))
    except SourceError:
        return None
    return None if token is None else life_of(token)


async def denied(
    api: KubeApi,
    verb: str,
    resource: str,
    *,
    timeout_s: float,
    group: str = "",
    namespace: str = "",
    name: str = "",
) -> str:
    """Why a request would be refused, by a review of rights; empty: it would not.

    ``resource`` is one of the ``group`` (empty: the core group), its subresource after a slash. ``name`` empty: for all
    objects.
    """
    kind, _, part = resource.partition("/")
    wanted = {"verb": verb, "group": group, "resource": kind, "subresource": part, "namespace": namespace, "name": name}
    wanted = {key: text for key, text in wanted.items() if text}
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": wanted},
    }
    try:
        answer = await api.request("POST", _REVIEWS, review, timeout_s=timeout_s)
    except SourceError as exc:
        return str(exc)
    return _may_not(answer, f"{verb} {resource}")


def _may_not(answer: HttpResponse, wanted: str) -> str:
    """Why it is refused; empty: it is allowed."""
    if answer.status not in {200, 201}:
        return f"API server: HTTP {answer.status} {words_of(answer, status_of(answer))}".rstrip()
    try:
        status = json.loads(answer.body)["status"]
        allowed, reason = bool(status["allowed"]), str(status.get("reason") or "")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return "API server: not a Kubernetes API server"
    return "" if allowed else f"API server: not allowed to {wanted}{f' ({reason})' if reason else ''}"


def _taskstats_problem() -> str:
    try:
        Taskstats().close()
    except SourceError as exc:
        return str(exc)
    return ""


def _perf_problem() -> str:
    """Open the counters for one CPU, as the daemon does first, and close them."""
    cpu = min(os.sched_getaffinity(0))
    missing = probe(RealPerf(), (CYCLES, INSTRUCTIONS), (CACHE_MISSES,), cpu).missing
    return next(iter(missing.values()), "")


def _pressure_trigger(node: InspectedNode) -> tuple[float | None, str]:
    """Arm the daemon's trigger for memory pressure, and disarm it."""
    try:
        spec = try_trigger(node_pressure_file(PressureResource.MEMORY, node.root), SPEC)
    except AgentError as exc:
        return None, str(exc)
    return spec.window_us / 1e6, ""


def release(version: str | None) -> tuple[int, int] | None:
    """Major and minor of ``v1.22.17``."""
    match = re.search(r"(\d+)\.(\d+)", version or "")
    return (int(match[1]), int(match[2])) if match else None
