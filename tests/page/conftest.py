"""A browser for all tests of this directory."""

from collections.abc import Iterator

import pytest

from tests.page.browser import Browser, browsing, chromium


@pytest.fixture
def browser() -> Iterator[Browser]:
    """A window of 1280x800. Skips, saying what is missing."""
    program = chromium()
    if program is None:
        pytest.skip("PAGE NOT TESTED IN A BROWSER: apt-get install --no-install-recommends chromium")
    with browsing(program) as made:
        made.size(1280, 800)
        yield made
