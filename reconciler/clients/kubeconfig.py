"""Kubeconfig files, as far as they define the endpoint: the current context's cluster and user.

Read with places, so that a refusal names file, line and column. Entries that need a program to be run (``exec``), a
vendor's plug-in (``auth-provider``) or a proxy are refused with a message that names the alternative.

Source: Kubernetes documentation, "kubeconfig (v1)".
"""

import base64
import binascii
import os
from collections.abc import Mapping
from typing import Any, Final, TypeVar

import msgspec
from msgspec import Struct

from cgroupfs.errors import InputError, SourceError
from reconciler.clients.endpoint import HttpEndpoint, InlineCredentials
from reconciler.clients.http_config import checked_token
from reconciler.runtime.safe_files import FileRule, read_file
from reconciler.settings.yaml import Path, YamlDocument, read_yaml

_T = TypeVar("_T")
_INSTEAD: Final = "a client certificate, token or tokenFile: bypassd runs no credential programs"


class _Cluster(Struct, rename="kebab"):
    server: str
    certificate_authority: str | None = None
    certificate_authority_data: str | None = None
    insecure_skip_tls_verify: bool = False
    tls_server_name: str | None = None
    proxy_url: str | None = None


class _KubeconfigUser(Struct, rename="kebab"):
    client_certificate: str | None = None
    client_certificate_data: str | None = None
    client_key: str | None = None
    client_key_data: str | None = None
    token: str | None = None
    token_file: str | None = msgspec.field(name="tokenFile", default=None)
    username: str | None = None
    # Of any shape: they are only refused.
    exec: Any = None
    auth_provider: Any = None


class _Context(Struct):
    cluster: str
    user: str


class _Named(Struct):
    """An entry of one of the three lists; what else is in it is read where it is chosen."""

    name: str


class _Config(Struct, rename={"current": "current-context"}):
    clusters: list[_Named]
    users: list[_Named]
    contexts: list[_Named]
    current: str | None = None


def read_kubeconfig(
    path: str, *, name: str, root: str = "/", timeout_s: float = 10.0, rule: FileRule = FileRule.OPERATOR
) -> HttpEndpoint:
    """The endpoint of the current context of ``path``; ``name`` is its name in messages.

    ``root`` is the prefix of all paths; ``rule`` is for the file and for those that it names. Errors: `SourceError`
    when the file cannot be read, `InputError` for its content.
    """
    try:
        text = read_file(path, rule, root=root).decode()
    except OSError as exc:
        raise SourceError(name, f"kubeconfig {path}: {exc.strerror or exc}") from exc
    except UnicodeDecodeError as exc:
        raise InputError(path, "binary data", "a kubeconfig") from exc
    try:
        document = read_yaml(text, path)
    except InputError as exc:
        raise _unquoted(exc) from None
    config = _typed(document, (), _Config)
    context_at = _chosen(document, "contexts", config.contexts, config.current)
    context = _typed(document, (*context_at, "context"), _Context)
    cluster_at = (*_chosen(document, "clusters", config.clusters, context.cluster), "cluster")
    user_at = (*_chosen(document, "users", config.users, context.user), "user")
    cluster = _typed(document, cluster_at, _Cluster)
    user = _typed(document, user_at, _KubeconfigUser) if document.value(user_at) is not None else _KubeconfigUser()
    _refuse_unusable(document, user_at, user)
    if cluster.proxy_url:
        raise document.refusal((*cluster_at, "proxy-url"), "no proxy: bypassd connects to the API server directly")
    if not cluster.server.startswith(("https://", "http://")):
        refusal = document.refusal((*cluster_at, "server"), "a URL such as https://10.0.0.1:6443")
        # The part before an @ is a password.
        raise _unquoted(refusal) if "@" in cluster.server else refusal
    files = _Files(document, root, os.path.dirname(path))
    ca, cert = cluster.certificate_authority_data, user.client_certificate_data
    named = (cluster.certificate_authority, user.client_certificate, user.client_key, user.token_file)
    return HttpEndpoint(
        name=name,
        url=cluster.server.rstrip("/"),
        # Where both are given, the data wins, as for kubectl.
        ca_file=None if ca else files.path(cluster.certificate_authority),
        cert_file=None if cert else files.path(user.client_certificate),
        key_file=None if cert else files.path(user.client_key),
        token_file=None if user.token else files.path(user.token_file),
        server_name=cluster.tls_server_name,
        insecure=cluster.insecure_skip_tls_verify,
        root_only=tuple(filter(None, map(files.path, named))) if rule is FileRule.ROOT and root == "/" else (),
        timeout_s=timeout_s,
        inline=InlineCredentials(
            ca=files.text((*cluster_at, "certificate-authority-data"), ca),
            cert=files.text((*user_at, "client-certificate-data"), cert),
            key=files.text((*user_at, "client-key-data"), user.client_key_data),
            token=files.token((*user_at, "token"), user.token),
        ),
    )


def _typed(document: YamlDocument, at: Path, kind: type[_T]) -> _T:
    try:
        return msgspec.convert(document.value(at), kind)
    except msgspec.ValidationError as exc:
        raise _unquoted(document.explain(exc, at)) from None


def _unquoted(error: InputError) -> InputError:
    """The same without the value: a value of a wrong form may be a token, a key, or a part of either.

    It is raised without a cause, which would have the value.
    """
    return InputError(error.where, "...", error.expected)


def _chosen(document: YamlDocument, group: str, entries: list[_Named], wanted: str | None) -> Path:
    """Place of the entry of that name; the only one where none is named."""
    if not wanted and len(entries) == 1:
        return (group, 0)
    for index, entry in enumerate(entries):
        if entry.name == wanted:
            return (group, index)
    missing = f"one named {wanted!r}" if wanted else "a current-context to choose one of them"
    names = ", ".join(entry.name for entry in entries) or "none"
    raise InputError(f"{document.place((group,))}: {group}", names, missing)


def _refuse_unusable(document: YamlDocument, at: Path, user: _KubeconfigUser) -> None:
    for key, value in (("exec", user.exec), ("auth-provider", user.auth_provider)):
        if value is not None:
            shown = value.get("command") or value.get("name") if isinstance(value, Mapping) else "..."
            raise InputError(f"{document.place((*at, key))}: user.{key}", shown, _INSTEAD)
    if user.username is not None:
        raise InputError(f"{document.place((*at, 'username'))}: user.username", user.username, _INSTEAD)
    has_cert, has_key = (
        bool(user.client_certificate or user.client_certificate_data),
        bool(user.client_key or user.client_key_data),
    )
    if has_cert != has_key:
        raise InputError(document.place(at), "a certificate without its key, or a key without its certificate", "both")


class _Files(Struct, frozen=True):
    document: YamlDocument
    root: str
    directory: str

    def path(self, path: str | None) -> str | None:
        """As it is on this machine: relative ones are below the kubeconfig's own directory."""
        return os.path.join(self.root, os.path.join(self.directory, path).lstrip("/")) if path else None

    def token(self, at: Path, text: str | None) -> str | None:
        """A token in the file itself. Errors: `InputError`, which does not show it."""
        try:
            return checked_token(text) if text else None
        except ValueError as exc:
            raise InputError(f"{self.document.place(at)}: {at[-1]}", "...", str(exc).removeprefix("expected ")) from exc

    def text(self, at: Path, data: str | None) -> str | None:
        """Base64 of a PEM text. Errors: `InputError`, which does not show it."""
        if not data:
            return None
        try:
            return base64.b64decode(data, validate=True).decode("ascii")
        except (binascii.Error, UnicodeDecodeError, ValueError):
            raise InputError(f"{self.document.place(at)}: {at[-1]}", "...", "base64 of PEM text") from None
