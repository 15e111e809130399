"""`make screenshots`: the pictures of the page in docs/images, of the made node."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

from tests.page.browser import Browser, browsing, chromium
from tests.page.made import MadeNode
from tests.page.served import served

IMAGES: Final = Path(__file__).parents[2] / "docs" / "images"
LARGEST: Final = 150_000
DRAWN: Final = "document.querySelectorAll('#podlist tbody a').length > 0 && document.querySelector('#hour path')"
WITH_RATES: Final = (
    "[...document.querySelectorAll('#podlist tbody tr')].some((row) => /^\\d/.test(row.cells[5]?.textContent))"
)


def main(directory: Path = IMAGES) -> int:
    """Write all pictures. Exit code 1 without a browser, or when one is too large."""
    program = chromium()
    if program is None or shutil.which("pngquant") is None:
        print("missing: apt-get install --no-install-recommends chromium pngquant", file=sys.stderr)
        return 1
    directory.mkdir(parents=True, exist_ok=True)
    with served(MadeNode(30)) as url, browsing(program) as browser:
        pictures = {
            "page-light.png": _drawn(browser, url, 1280, 1340),
            "page-dark.png": _drawn(browser, url, 1280, 800, dark=True),
            "page-pod.png": _drawn(browser, f"{url}#pod=shop/cart-0", 1280, 800),
            "page-phone.png": _drawn(browser, url, 390, 1300, scale=1.5),
        }
    sizes = []
    for name, data in pictures.items():
        small = subprocess.run(
            ["pngquant", "--speed", "1", "--strip", "-"], input=data, capture_output=True, check=True
        )
        (directory / name).write_bytes(small.stdout)
        sizes.append(len(small.stdout))
        print(f"{directory / name}: {sizes[-1]} bytes")
    return int(max(sizes) > LARGEST)


def _drawn(browser: Browser, url: str, width: int, height: int, *, scale: float = 1, dark: bool = False) -> bytes:
    browser.size(width, height, scale=scale, dark=dark)
    browser.open("about:blank")
    browser.open(url)
    browser.until(DRAWN)
    browser.until(WITH_RATES)
    if "#" in url:
        browser.until("document.querySelector('#pod-hour rect')")
    browser.value("document.activeElement.blur()")
    return browser.picture()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else IMAGES))
