"""A browser for all tests of this directory."""

from collections.abc import Iterator

import pytest

from tests.page.browser import Browser, Chromium, chromium, running


@pytest.fixture(scope="session")
def program() -> Iterator[Chromium]:
    """A browser takes half a second to start, and a profile nothing. Skips, saying what is missing."""
    path = chromium()
    if path is None:
        pytest.skip("PAGE NOT TESTED IN A BROWSER: apt-get install --no-install-recommends chromium")
    with running(path) as made:
        yield made


@pytest.fixture
def browser(program: Chromium) -> Iterator[Browser]:
    """A window of 1280x800 in a profile of its own."""
    with program.tab() as made:
        made.size(1280, 800)
        yield made
