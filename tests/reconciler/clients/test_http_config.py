"""What sinks and probes have in common: headers that are refused, and files of one line."""

from pathlib import Path

import pytest

from reconciler.alerts.sinks.webhook import WebhookSinkConfig
from reconciler.clients.endpoint import HttpEndpoint
from reconciler.clients.http_config import TlsTrust, check_headers, read_line
from reconciler.signals.probe_config import HttpProbe


@pytest.mark.parametrize("make", [WebhookSinkConfig, HttpProbe])
@pytest.mark.parametrize(
    ("headers", "files", "words"),
    [
        ({"a b": "x"}, {}, "headers: a key of 3 characters is not a header name"),
        ({"": "x"}, {}, "a key of 0 characters"),
        ({"X": "a\nb"}, {}, "headers: X: a value is one line of plain ASCII text"),
        ({"X": "ü"}, {}, "one line of plain ASCII text"),
        ({}, {"X:": "/a"}, "header_files: a key of 2 characters is not a header name"),
        ({}, {"X": "a"}, "header_files: X: expected an absolute path; got 1 characters"),
        ({"x-a": "b"}, {"X-A": "/a"}, "headers and header_files both give x-a"),
    ],
)
def test_headers_are_held_to_the_same_everywhere(
    make: type[WebhookSinkConfig | HttpProbe], headers: dict[str, str], files: dict[str, str], words: str
) -> None:
    for check in (check_headers, lambda item, two: make(url="http://h", headers=item, header_files=two)):
        with pytest.raises(ValueError, match=words):
            check(headers, files)
    make(url="http://h", headers={"X-Team_1": "a b"}, header_files={"Cookie": "/a"})


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"", "expected one line"), (b"a\nb", "expected one line"), (b"\xc3\xbc", "one line of"), (b"\xff", "not text")],
)
def test_a_file_that_is_not_one_line_is_an_error_without_what_is_in_it(
    tmp_path: Path, content: bytes, words: str
) -> None:
    (tmp_path / "key").write_bytes(b" hush \n")
    assert read_line("/key", str(tmp_path)) == "hush"
    (tmp_path / "key").write_bytes(content)
    with pytest.raises(ValueError, match=f"^/key: .*{words}"):
        read_line("/key", str(tmp_path))
    with pytest.raises(ValueError, match=r"^/none: cannot be read: No such file"):
        read_line("/none", str(tmp_path))


def test_a_peer_has_all_of_the_trust() -> None:
    trust = TlsTrust(token_file="/t", ca_file="/c", cert_file="/d", key_file="/k", server_name="n")
    assert trust.peer("p", "https://h", 3.0) == HttpEndpoint(
        name="p",
        url="https://h",
        token_file="/t",
        ca_file="/c",
        cert_file="/d",
        key_file="/k",
        server_name="n",
        timeout_s=3.0,
    )
    assert TlsTrust(insecure_skip_verify=True).peer("p", "https://h", 3.0).insecure
