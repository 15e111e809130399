"""Ending a pod through the API server: its Eviction subresource, as ``kubectl drain`` does.

When it has been accepted, the kubelet ends the pod; it counts as ended when its cgroups are empty. After a refusal by a
disruption budget the request is repeated for a while, and then the refusal is final. Where the API server does not
decide about the pod (401, 403, failures, silence), its budget is unknown (`EvictionResult.unasked`).

Source: Kubernetes documentation, "API-initiated Eviction"; kubectl's drain; the API server's eviction handler.
"""

import re
import time
from enum import Enum, auto
from typing import Final, final
from urllib.parse import quote

import msgspec
import trio
from msgspec import Struct

from cgroupfs.bounded import decoded
from cgroupfs.errors import CgroupError, SourceError
from reconciler.clients.http import HttpResponse
from reconciler.clients.kube import ApiStatus, KubeApi, status_of, wait_s_of, words_of
from reconciler.responses.means.base import EvictionMethod, EvictionResult, EvictionWork, MethodSetup, pdb_blocks
from reconciler.responses.means.config import EvictionMeans
from reconciler.responses.means.processes import thaw, wait_empty
from reconciler.runtime.format import duration
from state.eviction import EvictionCase, EvictionMethodName, EvictionOutcome, EvictionStep

_CORE: Final = "/api/v1"
# The name is from other sources than the API server, and "." and ".." would be other resources.
_NAME: Final = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_EVICTION: Final = "pods/eviction"
_LISTED: Final = 1 << 20
_NEWEST: Final = "policy/v1"
_OLDER: Final = "policy/v1beta1"
_BUDGET_CAUSE: Final = "DisruptionBudget"
_BUDGET_WORDS: Final = "disruption budget"
_LONGEST_TEXT: Final = 200
_SEVERAL_BUDGETS: Final = "more than one PodDisruptionBudget"


class EvictionAnswer(Enum):
    ACCEPTED = auto()
    BUDGET = auto()
    SEVERAL_BUDGETS = auto()
    NO_SUCH_POD = auto()
    NO_SUCH_VERSION = auto()
    BUSY = auto()
    NOT_ALLOWED = auto()


_FINAL: Final = frozenset({EvictionAnswer.NOT_ALLOWED, EvictionAnswer.NO_SUCH_VERSION, EvictionAnswer.SEVERAL_BUDGETS})
"""Repeating the request would change nothing."""


class EvictionReply(Struct, frozen=True, kw_only=True):
    """One reply, classified. ``wait_s``: the requested delay; None: none given."""

    said: EvictionAnswer
    words: str
    wait_s: float | None = None


def parse_reply(answer: HttpResponse) -> EvictionReply:
    """One answer of the API server, classified."""
    status = status_of(answer)
    message = f"HTTP {answer.status}: {words_of(answer, status)}".rstrip()
    causes = status.details.causes if status.details is not None else None
    for cause in causes or ():
        if cause.reason == _BUDGET_CAUSE and cause.message and cause.message not in message:
            message += f" ({' '.join(cause.message.split())[:_LONGEST_TEXT]})"  # it names the budget
            break
    return EvictionReply(said=_answer_of(answer, status), words=message, wait_s=wait_s_of(answer, status, time.time()))


def _answer_of(answer: HttpResponse, status: ApiStatus) -> EvictionAnswer:
    kind = status.details.kind if status.details is not None else ""
    match answer.status:
        case 200 | 201 | 202:
            return EvictionAnswer.ACCEPTED
        case 404 if kind == "pods" and status.reason == "NotFound":
            return EvictionAnswer.NO_SUCH_POD
        case 404 | 405:
            return EvictionAnswer.NO_SUCH_VERSION
        case 400 if "no kind" in status.message or "version" in status.message:
            return EvictionAnswer.NO_SUCH_VERSION
        case 409 if "UID" in status.message:
            return EvictionAnswer.NO_SUCH_POD  # another one has its name
        case 409:
            return EvictionAnswer.BUSY  # a concurrent change of the pod
        case 429 if status.has_cause(_BUDGET_CAUSE) or _BUDGET_WORDS in status.message:
            return EvictionAnswer.BUDGET
        case 500 if _SEVERAL_BUDGETS in status.message:
            return EvictionAnswer.SEVERAL_BUDGETS
        case code if code == 429 or code >= 500:
            # Another 429 is of the server as a whole: too much to do, or its storage is initializing.
            return EvictionAnswer.BUSY
        case _:
            return EvictionAnswer.NOT_ALLOWED


class _Resource(Struct, frozen=True):
    name: str = ""
    kind: str = ""
    group: str = ""
    version: str = ""


class _Resources(Struct, frozen=True):
    resources: list[_Resource] = []


_decode_resources = msgspec.json.Decoder(_Resources).decode


@final
class ApiEviction:
    """`EvictionMethod` through the API server."""

    means = EvictionMethodName.API

    def __init__(self, config: EvictionMeans, api: KubeApi) -> None:
        self._config = config
        self._api = api
        self._version: str | None = None

    def unusable(self, case: EvictionCase) -> EvictionResult | None:
        """Of a static pod the API server has only a mirror pod, which no disruption budget guards."""
        if case.target.static:
            return EvictionResult(detail="static pod: the API server holds only a mirror pod")
        why = self._api.unreachable()
        if why is None and (case.order.name is None or case.order.namespace is None):
            why = "pod name unknown"
        elif why is None and not all(_NAME.fullmatch(text or "") for text in (case.order.name, case.order.namespace)):
            why = "pod name is not valid for the API server"
        # A node that belongs to no cluster has no budgets; one whose credentials are missing has.
        return None if why is None else EvictionResult(detail=why, unasked=self._api.expected)

    async def terminate(self, work: EvictionWork) -> EvictionResult:
        """Request the Eviction and wait for the kubelet."""
        if work.resumed is not EvictionStep.WAIT:
            await work.step(EvictionStep.ASK)
            result = await self._ask(work)
            if result is not None:
                return result
            await work.step(EvictionStep.WAIT, accepted=True)
        try:
            # The runtime's SIGTERM has no effect on a stopped process.
            await thaw(work.tree)
            patience_s = work.grace_s + self._config.margin_s
            if await wait_empty(work.tree, max(0.0, patience_s - work.elapsed_s())):
                return EvictionResult(outcome=EvictionOutcome.DONE, detail="evicted through the API server")
        except CgroupError as exc:
            return EvictionResult(detail=f"accepted, but {exc}")
        return EvictionResult(detail=f"accepted, but the pod is still running after {duration(patience_s)}")

    async def _ask(self, work: EvictionWork) -> EvictionResult | None:
        """Request until it is accepted (None), refused, or it is pointless."""
        rules, wait_s = self._config.api, self._config.api.first_wait_s
        # A budget's time runs from the first request, also of an earlier run; that of failures from the first in this
        # run.
        now = trio.current_time()
        asked_at, failing_at = now - work.elapsed_s(), now
        while True:
            work.check()
            try:
                reply = await self._once(work)
            except SourceError as exc:
                reply = EvictionReply(said=EvictionAnswer.BUSY, words=str(exc))
            match reply.said:
                case EvictionAnswer.ACCEPTED:
                    return None
                case EvictionAnswer.NO_SUCH_POD:
                    return await self._unknown(work, reply.words)
            await work.replied(
                reply.words, budget=reply.said in {EvictionAnswer.BUDGET, EvictionAnswer.SEVERAL_BUDGETS}
            )
            if reply.said in _FINAL:
                return self._given_up(work.case, reply.words)
            # A refusal that is in the journal counts also where the API server only fails afterwards.
            begun, patience_s = (asked_at, rules.refused_s) if work.case.budget else (failing_at, rules.failing_s)
            # A server that wants no wait (a proxy's "Retry-After: 0") is not asked without a pause.
            pause_s = wait_s if reply.wait_s is None else max(reply.wait_s, rules.first_wait_s)
            pause_s = min(pause_s, rules.longest_wait_s)
            wait_s = min(2 * wait_s, rules.longest_wait_s)
            if trio.current_time() + pause_s - begun > patience_s:
                return self._given_up(work.case, f"no success within {duration(patience_s)}; {reply.words}")
            if await wait_empty(work.tree, pause_s):
                return EvictionResult(
                    outcome=EvictionOutcome.GONE, detail=f"ended during the API server's answer ({reply.words})"
                )

    def _given_up(self, case: EvictionCase, message: str) -> EvictionResult:
        """It was not accepted: by a disruption budget, or without one having been asked."""
        if not case.budget:
            # Methods that know no budget do not follow by themselves.
            return EvictionResult(detail=message, unasked=True)
        if case.budget not in message:
            message = f"{case.budget}; {message}"
        if (why := pdb_blocks(case, self._config, critical=case.order.critical)) is not None:
            return EvictionResult(outcome=EvictionOutcome.REFUSED, detail=f"{why}: {message}")
        return EvictionResult(detail=f"refused by its disruption budget; hard_over_budget is set: {message}")

    async def _unknown(self, work: EvictionWork, message: str) -> EvictionResult:
        """The API server has no such pod: the kubelet ends what is left of it here, as of any it should not have."""
        await thaw(work.tree)
        if await wait_empty(work.tree, work.grace_s + self._config.margin_s):
            return EvictionResult(
                outcome=EvictionOutcome.GONE, detail=f"the pod no longer exists at the API server ({message})"
            )
        # As from another cluster, or an older etcd: what it does not know has no budget there, and may have one.
        return EvictionResult(detail=f"the pod does not exist at the API server, but it runs ({message})", unasked=True)

    async def _once(self, work: EvictionWork) -> EvictionReply:
        """One request; two where the assumed version was wrong. Errors: `SourceError`."""
        version = await self._find_version()
        reply = await self._post(work, version)
        if reply.said is EvictionAnswer.NO_SUCH_VERSION:
            other = _OLDER if version == _NEWEST else _NEWEST
            again = await self._post(work, other)
            if again.said is not EvictionAnswer.NO_SUCH_VERSION:
                self._version = other
                return again
        return reply

    async def _post(self, work: EvictionWork, version: str) -> EvictionReply:
        order = work.case.order
        path = f"{_CORE}/namespaces/{quote(order.namespace or '', safe='')}/pods/{quote(order.name or '', safe='')}"
        # A successor of the same name is never affected, so that a request may be repeated.
        options: dict[str, object] = {"preconditions": {"uid": order.uid}}
        if order.grace_s is not None or (work.case.target.grace_s or 0) > work.grace_s:
            # Never 0, which would take the pod out of the API server before it has ended.
            options["gracePeriodSeconds"] = max(1, round(work.grace_s))
        body = {
            "apiVersion": version,
            "kind": "Eviction",
            "metadata": {"name": order.name, "namespace": order.namespace},
            "deleteOptions": options,
        }
        return parse_reply(await self._api.request("POST", f"{path}/eviction", body))

    async def _find_version(self) -> str:
        """The version of Eviction in the core group's list; the newest if the list has none.

        Before 1.22 it may be v1beta1.
        """
        if self._version is None:
            # The list of policy proves nothing: 1.21 has v1 for budgets only.
            answer = await self._api.request("GET", _CORE, most=_LISTED)
            try:
                listed = decoded(_decode_resources, answer.body).resources if answer.ok else []
            except ValueError:
                listed = []
            resource = next((item for item in listed if item.name == _EVICTION and item.version), None)
            if resource is None:
                return _NEWEST
            self._version = f"{resource.group}/{resource.version}"
        return self._version


def build(setup: MethodSetup) -> EvictionMethod:
    """The entry of `reconciler.responses.means.table`."""
    return ApiEviction(setup.config, setup.api)
