"""The built documents in a browser (``make site-test``): colours, a phone's width, search, no request to elsewhere."""

import contextlib
import functools
import http.server
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.page.browser import Browser

SITE = Path(os.environ.get("BYPASSD_SITE", "/nowhere"))


@pytest.fixture
def url() -> Iterator[str]:
    """The address of the site, on this machine."""
    if not (SITE / "index.html").exists():
        pytest.skip("SITE NOT TESTED: make site-test")

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(SITE))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        with contextlib.ExitStack() as stack:
            stack.callback(thread.join)
            stack.callback(server.shutdown)
            yield f"http://127.0.0.1:{server.server_port}"


def test_every_page_loads_without_an_error_or_a_request_to_elsewhere(browser: Browser, url: str) -> None:
    pages = sorted(str(path.relative_to(SITE)) for path in SITE.rglob("*.html") if path.name != "404.html")
    assert len(pages) > 30
    browser.size(400, 800)
    for page in pages:
        browser.open(f"{url}/{page}")
        # Pictures are there, and nothing is wider than a phone but what scrolls within itself.
        assert browser.value("[...document.images].every((image) => image.complete && image.naturalWidth > 0)"), page
        assert browser.value("document.documentElement.scrollWidth") == 400, page
    assert [text for text in browser.problems if "Lunr" not in text and "search scripts" not in text] == []
    assert [address for address in browser.requested if not address.startswith((url, "data:", "about:"))] == []


def test_colours_follow_the_system(browser: Browser, url: str) -> None:
    brightness = []
    for dark in (False, True):
        browser.size(1280, 800, dark=dark)
        browser.open("about:blank")
        browser.open(f"{url}/docs/concepts.html")
        colour = browser.value("getComputedStyle(document.documentElement.querySelector('body')).backgroundColor")
        brightness.append(sum(map(int, colour.strip("rgb()").split(","))))
    light, dark_one = brightness
    assert light > 600
    assert dark_one < 200


def test_search_finds_a_document(browser: Browser, url: str) -> None:
    browser.open(f"{url}/index.html")
    # The index is made in a worker.
    browser.until("typeof doSearch === 'function'")
    browser.value("document.getElementById('mkdocs-search-query').value = 'capacity file'")
    browser.until(
        "(() => { document.getElementById('mkdocs-search-query').dispatchEvent(new Event('keyup'));"
        " return document.querySelector('#mkdocs-search-results article a')?.href.includes('/docs/'); })()"
    )
    assert [address for address in browser.requested if not address.startswith((url, "data:", "about:"))] == []
