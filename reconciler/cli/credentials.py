"""``bypassctl init credentials``: rights to apply, a minimal kubeconfig for this node, and a test of what works.

The kubeconfig has one server, its CA and one token. With ``--from`` an administrator's kubeconfig is used for a single
request, a token of the service account (TokenRequest); nothing else of it is kept. Tokens are never printed.

Source: Kubernetes API reference, TokenRequest v1; "Authorization", SelfSubjectAccessReview.
"""

import base64
import json
import os
import time
from argparse import Namespace
from collections.abc import AsyncIterator, Collection
from typing import Final
from urllib.parse import quote

import msgspec
import trio
from msgspec import Struct
from msgspec.structs import replace

from cgroupfs.errors import AgentError, InputError, SourceError, errno_name
from reconciler.cli.asking import denied, token_life
from reconciler.cli.exits import CliError, Exit
from reconciler.cli.nodeview import InspectedNode, inspect_node, marks_of
from reconciler.cli.rights import ACCOUNT, RIGHTS, AccessRight, RightsUse, manifest
from reconciler.cli.screen import StyledText, Table, line, show
from reconciler.clients.api_identity import NAME, OWN_KUBECONFIG, OWN_MARK, own_identity, watches_pods
from reconciler.clients.endpoint import MASK, HttpEndpoint
from reconciler.clients.http import HttpSession
from reconciler.clients.http_config import checked_token
from reconciler.clients.kube import KubeApi, status_of, words_of
from reconciler.clients.kube_config import ApiIdentity, ApiServer, NodeSettings
from reconciler.clients.kubeconfig import read_kubeconfig
from reconciler.config.environment import kubelet_peer, node_name
from reconciler.headroom.cpu import ClusterTarget
from reconciler.runtime import format as fmt
from reconciler.runtime import streams
from reconciler.runtime.safe_files import LARGEST, FileRule, read_file, replace_file
from reconciler.sources.kubelet_api import decode_pods
from state.closing import NodeMark
from state.eviction import EvictionMethodName

_TIMEOUT_S: Final = 10.0
_TEST_S: Final = 5.0
_LONGEST_TOKEN: Final = 64 * 1024
_DAY_S: Final = 86_400
_OF_HEADROOM: Final = {
    RightsUse.NODE: {ClusterTarget.NODE, ClusterTarget.AUTO},
    RightsUse.KOORDINATOR: {ClusterTarget.KOORDINATOR, ClusterTarget.AUTO},
    RightsUse.KATALYST: {ClusterTarget.KATALYST, ClusterTarget.AUTO},
}
_OF_SETTINGS: Final = {
    NodeSettings.KOORDINATOR: (RightsUse.SETTINGS_KOORDINATOR,),
    NodeSettings.KATALYST: (RightsUse.SETTINGS_KATALYST,),
}
_TAINTS: Final = frozenset({NodeMark.PREFER_NO_SCHEDULE, NodeMark.NO_SCHEDULE})


class _TokenStatus(Struct, frozen=True, rename="camel"):
    token: str = ""
    expiration_timestamp: str = ""


class _TokenAnswer(Struct, frozen=True):
    status: _TokenStatus = _TokenStatus()


class ApiAccess(Struct, frozen=True, kw_only=True):
    """The content of the kubeconfig. ``ca``: PEM; None: the system's. ``expires``: RFC 3339, of a requested token."""

    server: str
    ca: str | None
    token: str
    server_name: str | None = None
    expires: str = ""


class AccessTest(Struct, frozen=True, kw_only=True):
    """One tested right. ``problem`` empty: it works. ``wanted``: whether this configuration uses it."""

    name: str
    wanted: bool
    found: str = ""
    problem: str = ""


def run(options: Namespace) -> int:
    """Without ``--from`` and ``--server``: print the rights, or with ``--test`` test what is in force.

    `Exit.NOT_OK` when something that the configuration uses does not work.
    """
    if options.root != "/":
        raise CliError("credentials are made on the node itself, not for a copied one", Exit.USAGE)
    makes_one = options.source is not None or options.server is not None
    if makes_one:
        if options.source is not None and options.server is not None:
            raise CliError("--from and --server: only one of them", Exit.USAGE)
        if options.test:
            raise CliError("--test tests the credentials in force; without --from and --server", Exit.USAGE)
    elif options.ca is not None or options.token_file is not None:
        raise CliError("--ca and --token-file require --server or --from", Exit.USAGE)
    node = inspect_node(options, strict=True)
    if not makes_one:
        if options.test:
            return _tested(node, node.config.apiserver)
        streams.write(manifest(options.uses or _uses(node), options.namespace, node_name(node.kubelet)))
        return Exit.OK
    access = _from_admin(options) if options.source is not None else _from_options(options)
    if options.dry_run:
        streams.write(render(replace(access, token=MASK)))
        return Exit.OK
    _write(options.to, render(access))
    show([line(f"{options.to}: written, mode 600", f"; its token expires {access.expires}" if access.expires else "")])
    config = node.config.apiserver
    if config.server is not None or (config.kubeconfig or OWN_KUBECONFIG) != options.to:
        show([line(f"not used by the configuration: set apiserver.kubeconfig: {options.to}")])
    elif not config.enabled or config.identity is ApiIdentity.KUBELET:
        show([line("not used by the configuration: see apiserver.enabled and apiserver.identity")])
    show([line("a running daemon uses it within seconds; no restart is needed")])
    return _tested(node, ApiServer(kubeconfig=options.to))


def _uses(node: InspectedNode) -> list[RightsUse]:
    """The uses of this configuration.

    Only on request, as their rights are broad: the kubelet's port, and a taint where ``auto`` would set one.
    """
    config = node.config
    uses = [RightsUse.PODS]
    if config.eviction.enabled and EvictionMethodName.API in config.eviction.means.order:
        uses.append(RightsUse.EVICTION)
    if any(getattr(sink, "kubernetes", None) is not None for sink in config.alerts.sinks.values()):
        uses.append(RightsUse.EVENTS)
    if config.closing.enabled and config.closing.mark is NodeMark.CONDITION:
        uses.append(RightsUse.CONDITION)
    elif config.closing.enabled and config.closing.mark in _TAINTS:
        uses.append(RightsUse.TAINT)
    uses += _OF_SETTINGS.get(config.apiserver.node_settings, ())
    return uses + [use for use, targets in _OF_HEADROOM.items() if config.headroom.publish in targets]


# The kubeconfig


def render(access: ApiAccess) -> str:
    """The kubeconfig. All texts are JSON strings, which YAML has too."""
    cluster = [f"    server: {json.dumps(access.server)}"]
    if access.ca is not None:
        cluster.append(f"    certificate-authority-data: {base64.b64encode(access.ca.encode()).decode()}")
    if access.server_name:
        cluster.append(f"    tls-server-name: {json.dumps(access.server_name)}")
    return "\n".join(
        (
            f"{OWN_MARK}this node's bypassd at the API server.",
            "apiVersion: v1",
            "kind: Config",
            "clusters:",
            "- name: cluster",
            "  cluster:",
            *cluster,
            "users:",
            "- name: bypassd",
            "  user:",
            f"    token: {json.dumps(access.token)}",
            "contexts:",
            "- name: bypassd",
            "  context: {cluster: cluster, user: bypassd}",
            "current-context: bypassd",
            "",
        )
    )


def _write(path: str, text: str) -> None:
    """Atomically and durably, readable for root alone. Errors: `CliError`."""
    try:
        os.makedirs(os.path.dirname(os.path.abspath(path)), mode=0o755, exist_ok=True)
        replace_file(path, text.encode(), mode=0o600, durable=True)
    except OSError as exc:
        raise CliError(f"{path}: {errno_name(exc.errno)}", Exit.REFUSED) from exc


def _from_options(options: Namespace) -> ApiAccess:
    if not options.server.startswith("https://"):
        raise CliError("--server: expected a URL such as https://10.0.0.1:6443", Exit.USAGE)
    if options.token_file is None:
        raise CliError("--server requires --token-file", Exit.USAGE)
    ca = None if options.ca is None else _pem(options.ca)
    return ApiAccess(server=options.server.rstrip("/"), ca=ca, token=_token_of(options.token_file))


def _from_admin(options: Namespace) -> ApiAccess:
    """Server and CA of a kubeconfig; the token is a file's or requested. Errors: `CliError`."""
    try:
        admin = read_kubeconfig(os.path.abspath(options.source), name=NAME, timeout_s=_TIMEOUT_S)
    except (InputError, SourceError) as exc:
        hint = "; or: kubectl create token, --server, --ca and --token-file" if "exec" in str(exc) else ""
        raise CliError(f"{exc}{hint}", Exit.USAGE) from exc
    if admin.exposed:
        raise CliError(f"{options.source}: {admin.exposed}", Exit.USAGE)
    if not admin.secure or admin.insecure:
        raise CliError(f"{options.source}: the server's certificate must be verified: https and its CA", Exit.USAGE)
    ca_file = options.ca or (None if admin.inline.ca else admin.ca_file)
    ca = admin.inline.ca if ca_file is None else _pem(ca_file)
    access = ApiAccess(server=admin.url, ca=ca, token="", server_name=admin.server_name)
    if options.token_file is not None:
        return replace(access, token=_token_of(options.token_file))
    status = trio.run(_request_token, admin, options)
    return replace(access, token=status.token, expires=status.expiration_timestamp[:40])


async def _request_token(admin: HttpEndpoint, options: Namespace) -> _TokenStatus:
    path = f"/api/v1/namespaces/{quote(options.namespace, safe='')}/serviceaccounts/{ACCOUNT}/token"
    body = {
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenRequest",
        "spec": {"expirationSeconds": options.days * _DAY_S},
    }
    headers = {"Content-Type": "application/json"}
    async with HttpSession(admin) as session:
        answer = await session.exchange("POST", path, msgspec.json.encode(body), headers, most=_LONGEST_TOKEN)
    if answer.status == 404:
        raise CliError(
            f"the service account {options.namespace}/{ACCOUNT} does not exist; first: bypassctl init credentials | "
            "kubectl apply -f -",
            Exit.REFUSED,
        )
    if not answer.ok:
        raise CliError(f"{path}: HTTP {answer.status} {words_of(answer, status_of(answer))}", Exit.REFUSED)
    try:
        status = msgspec.json.decode(answer.body, type=_TokenAnswer).status
        return replace(status, token=checked_token(status.token))
    except (msgspec.MsgspecError, ValueError, RecursionError):
        # Without the cause: it may quote the token.
        raise CliError(f"{path}: the answer has no usable token", Exit.REFUSED) from None


def _pem(path: str) -> str:
    text = _ascii(path, LARGEST)
    if "-----BEGIN CERTIFICATE-----" not in text:
        raise CliError(f"{path}: expected a certificate, PEM", Exit.USAGE)
    return text


def _token_of(path: str) -> str:
    try:
        return checked_token(_ascii(path, _LONGEST_TOKEN))
    except ValueError:
        raise CliError(f"{path}: expected a token: one line of printable ASCII", Exit.USAGE) from None


def _ascii(path: str, largest: int) -> str:
    """A file that the command line names; empty text for one that is not ASCII. Errors: `CliError`."""
    try:
        content = read_file(os.path.abspath(path), FileRule.OPERATOR, largest=largest)
    except OSError as exc:
        raise CliError(f"{path}: {exc.strerror or exc}", Exit.USAGE) from exc
    return content.decode() if content.isascii() else ""


# The test


def _tested(node: InspectedNode, config: ApiServer) -> int:
    tests = trio.run(test_access, node, config)
    show([Table(("", "ACCESS", "FOUND"), list(map(_row, tests)))])
    return Exit.NOT_OK if any(test.wanted and test.problem for test in tests) else Exit.OK


def _row(test: AccessTest) -> tuple[str | StyledText, ...]:
    if not test.problem:
        return StyledText("ok", "ok"), test.name, test.found or "allowed"
    mark = StyledText("bad", "bad") if test.wanted else StyledText("-", "dim")
    return mark, test.name, test.problem + ("" if test.wanted else " (not used by this configuration)")


async def test_access(node: InspectedNode, config: ApiServer) -> list[AccessTest]:
    """Each access on its own, with the daemon's requests; nothing is changed by any. Never raises `SourceError`."""
    uses = {*_uses(node)}
    if not (config.kubeconfig or watches_pods(config, root=node.root, kubelets=node.kubelet.kubeconfig)):
        uses.discard(RightsUse.PODS)
    async with KubeApi(config, root=node.root, kubelets=node.kubelet.kubeconfig) as api:
        tests = [await _list_pods(api, node, RightsUse.PODS in uses)]
        tests += await _reviews(api, node_name(node.kubelet), uses)
        tests += [test async for test in _token_tests(api, node, config)]
        tests.append(await _get_node(api, node))
    tests.append(await _kubelet(node, config))
    return tests


async def _list_pods(api: KubeApi, node: InspectedNode, wanted: bool) -> AccessTest:
    name = node_name(node.kubelet)
    # Version 0: from the server's cache, not from etcd.
    path = f"/api/v1/pods?fieldSelector=spec.nodeName%3D{quote(name, safe='')}&resourceVersion=0&limit=1"
    problem = await _get(api, path)
    return AccessTest(name="list pods", wanted=wanted, found=f"pods of node {name}", problem=problem)


async def _get_node(api: KubeApi, node: InspectedNode) -> AccessTest:
    """Only a check of the name."""
    name = node_name(node.kubelet)
    problem = await _get(api, f"/api/v1/nodes/{quote(name, safe='')}")
    return AccessTest(name="get nodes", wanted=False, found=f"the node is named {name}", problem=problem)


async def _get(api: KubeApi, path: str) -> str:
    try:
        answer = await api.request("GET", path, timeout_s=_TEST_S)
    except SourceError as exc:
        return str(exc)
    return "" if answer.ok else f"{NAME}: HTTP {answer.status} {words_of(answer, status_of(answer))}".rstrip()


async def _reviews(api: KubeApi, node: str, uses: Collection[RightsUse]) -> list[AccessTest]:
    """Each access once, whatever number of uses need it."""
    tests: dict[str, AccessTest] = {}
    for right in RIGHTS:
        if right.use in {RightsUse.KUBELET, RightsUse.RENEWAL}:
            continue
        known, wanted = tests.get(right.access), right.use in uses
        tests[right.access] = (
            await _review(api, right, node, wanted) if known is None else replace(known, wanted=known.wanted or wanted)
        )
    return list(tests.values())


async def _review(api: KubeApi, right: AccessRight, node: str, wanted: bool) -> AccessTest:
    """A review of rights, which changes nothing; for the group that is used by default."""
    # Rights to objects of this node's name may be for these alone.
    only = node if right.own_node else ""
    refused: list[str] = []
    for verb in right.verbs:
        why = await denied(api, verb, right.resource, timeout_s=_TEST_S, group=right.groups[0], name=only)
        refused += [why] if why else []
    return AccessTest(name=right.access, wanted=wanted, problem=refused[0] if refused else "")


async def _token_tests(api: KubeApi, node: InspectedNode, config: ApiServer) -> AsyncIterator[AccessTest]:
    """The life of the token, and whether it may renew itself; nothing where it does not name a service account."""
    life = token_life(node, config)
    if life is None:
        return
    now = time.time()
    text, problem = life.describe(now), life.is_due(now)
    yield AccessTest(name="token", wanted=True, found=text, problem=text if problem else "")
    for right in RIGHTS:
        if right.use is RightsUse.RENEWAL and life.account == ACCOUNT:
            why = await denied(
                api, right.verbs[0], right.resource, timeout_s=_TEST_S, namespace=life.namespace, name=life.account
            )
            yield AccessTest(name=right.access, wanted=False, found="renewed by the daemon", problem=why)


async def _kubelet(node: InspectedNode, config: ApiServer) -> AccessTest:
    peer = kubelet_peer(node.config.kubelet, node.kubelet, own_identity(config, root=node.root))
    test = AccessTest(name="kubelet /pods", wanted=peer is not None)
    if peer is None:
        return replace(test, problem="kubelet.endpoint is off, or no kubelet was found")
    try:
        async with HttpSession(peer) as session:
            pods, _ = decode_pods(await session.get("/pods"), marks_of(node.config))
    except (AgentError, ValueError) as exc:
        return replace(test, problem=str(exc))
    return replace(test, found=f"{peer.shown}: {fmt.plural(len(pods), 'pod')}")
