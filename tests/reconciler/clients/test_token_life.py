"""How long a token is valid, by its own claims: bounded, and known only where it says so."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgroupfs.errors import SourceError
from reconciler.clients.endpoint import HttpEndpoint, InlineCredentials
from reconciler.clients.token_life import TokenLife, life_of, token_of
from tests.fakes.jwt import jwt, signed

DAY_S = 86_400.0
NOW = 1_800_000_000.0


def test_a_service_accounts_token_says_its_end_and_its_account() -> None:
    life = life_of(jwt(NOW + 365 * DAY_S, issued_s=NOW))
    assert life == TokenLife(expires_s=NOW + 365 * DAY_S, issued_s=NOW, namespace="kube-system", account="bypassd")
    assert life.whole_s == 365 * DAY_S
    assert life.describe(NOW).startswith("the token of service account kube-system/bypassd expires in 365 d, at 20")
    assert life.describe(NOW + 366 * DAY_S).startswith(
        "the token of service account kube-system/bypassd expired 24 h ago, at 20"
    )


@pytest.mark.parametrize(
    ("whole_s", "left_s", "due"),
    [
        (365 * DAY_S, 7.1 * DAY_S, False),
        (365 * DAY_S, 6.9 * DAY_S, True),
        (3600.0, 720.0, False),  # the kubelet renews a pod's token then
        (3600.0, 361.0, False),
        (3600.0, 359.0, True),
        (None, 6.9 * DAY_S, True),
        (3600.0, -1.0, True),
    ],
)
def test_a_token_is_due_days_before_its_end_and_a_short_one_in_its_last_tenth(
    whole_s: float | None, left_s: float, due: bool
) -> None:
    issued_s = None if whole_s is None else NOW - whole_s
    assert TokenLife(expires_s=NOW, issued_s=issued_s).is_due(NOW - left_s) is due


@pytest.mark.parametrize(
    "token",
    [
        "",
        "opaque",
        "a.b.c",
        "a.b.c.d",
        "..",
        f"{'a' * 70_000}.b.c",
        f"a.{'a' * 20_000}.c",
        signed(b"{}"),
        signed(b"[]"),
        signed(b'{"exp": "tomorrow"}'),
        signed(b'{"exp": null}'),
        signed(b'{"exp": -1}'),
        signed(b'{"exp": 1e400}'),
        signed(b'{"exp": NaN}'),
        signed(b'{"exp": 99999999999999999999999999}'),
        signed(b'{"exp": 1, "sub": 7}'),
        signed(b'{"exp":' + b"[" * 5000),
        signed(b'{"exp": 1}').replace(".", ".!", 1),
    ],
)
def test_a_token_of_any_other_form_has_no_known_life(token: str) -> None:
    assert life_of(token) is None


@pytest.mark.parametrize(
    "subject",
    [
        "",
        "admin",
        "system:node:n1",
        "system:serviceaccount:kube-system:",
        "system:serviceaccount:..:x",
        "system:serviceaccount:a:b:c",
        "system:serviceaccount:a/b:c",
        "system:serviceaccount:A:b",
    ],
)
def test_another_subject_names_no_service_account(subject: str) -> None:
    life = life_of(jwt(NOW, subject=subject))
    assert life is not None
    assert (life.namespace, life.account) == ("", "")


@given(st.text())
def test_any_text_is_read_without_an_error(text: str) -> None:
    life_of(text)
    life_of(f"a.{text}.c")


@given(st.binary(max_size=200))
def test_any_claims_are_read_without_an_error(body: bytes) -> None:
    life_of(signed(body))


def test_the_token_of_a_peer_is_that_of_its_file_or_kubeconfig(tmp_path: object) -> None:
    inline = HttpEndpoint(name="x", url="https://x", inline=InlineCredentials(token="abc"))
    assert token_of(inline) == "abc"
    assert token_of(HttpEndpoint(name="x", url="https://x")) is None
    file = f"{tmp_path}/token"
    with pytest.raises(SourceError, match="cannot read the token"):
        token_of(HttpEndpoint(name="x", url="https://x", token_file=file))
    with open(file, "w", encoding="ascii") as out:
        out.write("secret text\n")
    with pytest.raises(SourceError) as error:
        token_of(HttpEndpoint(name="x", url="https://x", token_file=file))
    assert "secret" not in str(error.value)
