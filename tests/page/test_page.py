"""The page in a browser, of made nodes: what is drawn, requested, and done by keys. None of a pod's texts is more."""

from pathlib import Path

import pytest

from tests.page.browser import Browser
from tests.page.made import MadeNode, uid_of
from tests.page.served import served

ROWS = "[...document.querySelectorAll('#podlist tbody tr:not(.pad)')]"
NAMES = f"{ROWS}.map((row) => row.cells[0].innerText)"
READY = "document.getElementById('node').textContent === 'node-17' && !document.getElementById('pods').hidden"
HOSTILE = (
    ("shop", "<img src=x onerror=document.title='owned'>"),
    ("shop", "</script><script>document.title='owned'</script>"),
    ("javascript:alert(1)", "'\"--><svg onload=alert(1)>"),
    ("shop", "\u202egnp.exe \u0000\u0007 %00/../../#pod=x"),
    ("shop", "x" * 4000),
)


def opened(browser: Browser, url: str) -> None:
    browser.open(url)
    browser.until(READY)


def natural(title: str) -> tuple[str, int]:
    """As the page sorts texts: the numbers in them by value."""
    text, _, number = title.rpartition("-")
    return text, int(number)


def clean(browser: Browser, url: str) -> None:
    """No error, no warning, no blocked code, and no request but to the daemon."""
    assert browser.problems == []
    origin = url.partition("#")[0]
    assert [address for address in browser.requested if not address.startswith((origin, "data:,", "about:"))] == []


@pytest.mark.parametrize("count", [0, 1, 30, 500])
def test_pods_are_listed_and_only_visible_rows_are_drawn(browser: Browser, count: int) -> None:
    with served(MadeNode(count)) as url:
        opened(browser, url)
        assert browser.value("document.querySelector('#podlist table').getAttribute('aria-rowcount')") == str(count + 1)
        assert browser.value("document.querySelector('#chips button').textContent") == f"all {count}"
        assert min(count, 20) <= browser.value(f"{ROWS}.length") <= min(count, 30)
        assert browser.value("document.querySelectorAll('#map .cpu').length") == 32
        assert browser.value("document.getElementById('window').textContent").startswith("window: office until ")
        assert browser.value("!document.querySelector('#podlist .empty').hidden") == (count == 0)
        clean(browser, url)


def test_the_end_of_a_long_list_is_reached_by_keys(browser: Browser) -> None:
    with served(MadeNode(500)) as url:
        opened(browser, url)
        browser.value("document.querySelector('#podlist thead button').click()")
        names = browser.value(NAMES)
        assert names == sorted(names, key=natural)
        browser.value(f"{ROWS}[0].querySelector('a').focus()")
        browser.press("End")
        last = max(("/".join(MadeNode(500).name_of(number)) for number in range(500)), key=natural)
        assert browser.value("document.activeElement.innerText") == last
        assert browser.value(f"{ROWS}.length") <= 30
        browser.press("Enter")
        browser.until("!document.getElementById('drawer').hidden")
        assert browser.value("document.getElementById('pod-title').textContent") == last
        browser.press("Escape")
        browser.until("document.getElementById('drawer').hidden")
        assert browser.value("document.activeElement.innerText") == last


def test_columns_sort_by_keys_and_say_so(browser: Browser) -> None:
    with served(MadeNode(30)) as url:
        opened(browser, url)
        browser.value("document.querySelectorAll('#podlist thead button')[7].focus()")
        for order in ("descending", "ascending"):
            browser.press("Enter")
            assert browser.value("document.querySelectorAll('#podlist th')[7].getAttribute('aria-sort')") == order
            waits = browser.value(f"{ROWS}.map((row) => parseFloat(row.cells[7].innerText)).filter((n) => n === n)")
            assert waits == sorted(waits, reverse=order == "descending")
        assert browser.value("document.querySelectorAll('#podlist th[aria-sort]').length") == 1


def test_the_filter_is_one_key_away_and_takes_words_and_classes(browser: Browser) -> None:
    with served(MadeNode(30)) as url:
        opened(browser, url)
        for key in "/held":
            browser.press(key)
        browser.until(f"{ROWS}.length === 1")
        assert browser.value(NAMES) == ["shop/stock-0"]
        browser.press("Escape")
        browser.until(f"{ROWS}.length > 1")
        browser.value(
            "[...document.querySelectorAll('#chips button')].find((b) => /dedicated/.test(b.textContent)).click()"
        )
        assert sorted(browser.value(NAMES)) == ["shop/cart-1", "shop/search-0"]


def test_a_missing_signal_a_yielded_file_and_a_suspected_victim_are_shown_by_these_words(browser: Browser) -> None:
    with served(MadeNode(30)) as url:
        opened(browser, url)
        browser.until("document.querySelectorAll('#lacks li').length > 1")
        lacks = browser.value("document.getElementById('lacks').innerText")
        assert "llc.misses: no hardware counter" in lacks
        kinds = browser.value("[...document.querySelectorAll('#events li b')].map((b) => b.textContent)")
        assert {"yielded", "suspected", "interfered"} <= set(kinds)
        assert "suspect" not in kinds
        assert browser.value("document.getElementById('holds').innerText").startswith("until")
        clean(browser, url)


@pytest.mark.parametrize("width", [360, 390, 1280])
def test_no_state_is_cut_off(browser: Browser, width: int) -> None:
    browser.size(width, 1300)
    with served(MadeNode(30)) as url:
        opened(browser, url)
        browser.until(f"{ROWS}.length > 10")
        cells = f"{ROWS}.map((row) => row.querySelector('td:last-child'))"
        assert "unmanaged" in browser.value(f"{cells}.map((cell) => cell.textContent)")
        cut = f"{cells}.filter((cell) => cell.scrollWidth > cell.clientWidth).map((cell) => cell.textContent)"
        assert browser.value(cut) == []


def test_throttling_by_a_directory_above_the_pods_is_shown_with_who_set_its_quota(browser: Browser) -> None:
    text = "/kubepods/besteffort: quota of 9.50 CPUs for all pods below it, by bypassd (reclaimed)"
    with served(MadeNode(30)) as url:
        opened(browser, url)
        for key in "/transcode":
            browser.press(key)
        cells = f"Object.fromEntries({ROWS}.map((row) => [row.cells[0].innerText, row.cells[6].innerText]))"
        browser.until(f"/\\^$/.test({cells}['batch/transcode-8'])")
        found = browser.value(cells)
        assert 20 < float(found["batch/transcode-8"].removesuffix(" %^")) < 45
        assert 5 < float(found["batch/transcode-3"].removesuffix(" %")) < 20
        assert browser.value("document.getElementById('above').textContent") == f"^ {text}"
        browser.value("location.hash = '#pod=batch/transcode-8'")
        browser.until("document.querySelectorAll('#pod-hour svg').length === 4")
        assert f"of periods, by {text}" in browser.value("document.getElementById('facts').innerText")
        assert "above: /kubepods/besteffort" in browser.value("document.getElementById('pod-hour').innerText")
        clean(browser, url)


def test_on_a_phone_names_of_replicas_are_told_apart_by_their_ends(browser: Browser) -> None:
    browser.size(360, 1300)
    names = [("shop", f"checkout-frontend-7d9f8b6c5d-{end}") for end in ("x2k4p", "q8m2z", "k7wvm")]
    with served(MadeNode(30, names)) as url:
        opened(browser, url)
        for key in "/frontend":
            browser.press(key)
        browser.until(f"{ROWS}.length === 3")
        ends = browser.value(
            f"{ROWS}.map((row) => row.querySelector('a').lastChild).map((end) => [end.textContent,"
            " end.getBoundingClientRect().right <= end.closest('td').getBoundingClientRect().right])"
        )
        assert sorted(ends) == [["k7wvm", True], ["q8m2z", True], ["x2k4p", True]]
        assert browser.value("document.querySelector('#podlist a').innerText").startswith(
            "checkout-frontend-7d9f8b6c5d-"
        )


def test_the_hour_of_a_large_node_with_little_use_is_not_a_flat_line(browser: Browser) -> None:
    texts = "[...document.querySelectorAll('#hour text')].map((text) => text.textContent)"
    for node, cpus in ((MadeNode(1), 32), (MadeNode(1, cpus=256), 256)):
        with served(node) as url:
            opened(browser, url)
            browser.until(
                f"document.querySelector('#hour path') && document.querySelectorAll('#map .cpu').length === {cpus}"
            )
            assert browser.value(texts)[:5] == ["0", "8", "16", "24", "32"]


def test_hostile_names_are_text(browser: Browser) -> None:
    with served(MadeNode(30, HOSTILE)) as url:
        opened(browser, url)
        shown = browser.value("state.pods.filter((pod) => pod.title.includes('<')).map((pod) => pod.title)")
        assert sorted(shown) == sorted("/".join(pair) for pair in HOSTILE[:3])
        links = browser.value("[...document.querySelectorAll('#podlist a')].map((a) => a.textContent)")
        assert set(shown) <= set(links)
        assert browser.value("document.querySelectorAll('#podlist img, #podlist svg, #podlist script').length") == 0
        # Its link is a place on this page, whatever the name is.
        hrefs = browser.value("[...document.querySelectorAll('#podlist a')].map((a) => a.getAttribute('href'))")
        assert all(href.startswith("#pod=") for href in hrefs)
        for number in range(len(HOSTILE)):
            browser.value(f"location.hash = link(state.byUid.get('{uid_of(number)}'))")
            browser.until(f"document.getElementById('facts').innerText.includes('{uid_of(number)}')")
            # A command that is copied has the uid instead of such a name.
            assert (
                browser.value("document.querySelector('#about code').textContent") == f"bypassctl why {uid_of(number)}"
            )
        assert browser.value("document.title") == "node-17 · bypassd"
        clean(browser, url)


def test_code_that_came_into_the_page_would_not_run(browser: Browser) -> None:
    with served(MadeNode(1)) as url:
        opened(browser, url)
        browser.value("try { document.body.innerHTML = '<img src=x onerror=document.title=1>' } catch { }")
        browser.value(
            "const made = document.createElement('script'); try { made.textContent = 'document.title=1' } catch {}"
            "document.body.append(made)"
        )
        browser.value("fetch('http://elsewhere.example/').catch(() => 0)")
        assert browser.value("document.title") == "node-17 · bypassd"
        refused = " ".join(browser.problems)
        assert "TrustedHTML" in refused
        assert "Content Security Policy" in refused


@pytest.mark.parametrize("link", ["#pod=shop/cart-0", f"#pod={uid_of(2)}"])
def test_a_deep_link_opens_its_pod_with_its_hour(browser: Browser, link: str) -> None:
    with served(MadeNode(30)) as url:
        opened(browser, url + link)
        browser.until("document.querySelectorAll('#pod-hour svg').length === 3")
        assert uid_of(2) in browser.value("document.getElementById('facts').innerText")
        assert browser.value("document.querySelector('#about code').textContent") == "bypassctl why shop/cart-0"
        clean(browser, url)


def test_a_link_to_a_pod_that_is_gone_says_so(browser: Browser) -> None:
    with served(MadeNode(1)) as url:
        opened(browser, f"{url}#pod=shop/gone%2F%3Cb%3E")
        browser.until("/no such pod/.test(document.getElementById('facts').innerText)")
        assert browser.value("document.getElementById('pod-title').textContent") == "shop/gone/<b>"


def test_nothing_is_requested_while_the_tab_is_hidden(browser: Browser) -> None:
    node = MadeNode(1)
    with served(node) as url:
        opened(browser, url)
        browser.hidden(hidden=True)
        browser.until("!running")
        before = len(node.asked)
        # Longer than two intervals of the page's own clock.
        browser.value("new Promise((done) => setTimeout(done, 4500))")
        assert len(node.asked) == before
        browser.hidden(hidden=False)
        at = browser.value("state.at")
        browser.until(f"state.at > {at}")
        assert len(node.asked) > before


def test_the_ledger_is_requested_when_it_is_wanted(browser: Browser) -> None:
    node = MadeNode(30)
    with served(node) as url:
        opened(browser, url)
        assert not any("files" in sections for sections in node.asked)
        browser.value("document.getElementById('ledger-load').click()")
        browser.until("document.querySelectorAll('#files tbody tr:not(.pad)').length > 10")
        browser.value("const box = document.getElementById('ledger-filter'); box.value = 'kubelet'; box.oninput()")
        rows = browser.value("[...document.querySelectorAll('#files tbody tr:not(.pad)')].map((row) => row.innerText)")
        assert len(rows) == 2
        assert all("kubelet[812]" in row and "batch/transcode-8" in row for row in rows)


def test_values_of_files_have_their_units(browser: Browser) -> None:
    with served(MadeNode(30)) as url:
        opened(browser, url)
        browser.value("document.getElementById('ledger-load').click()")
        browser.until("document.querySelectorAll('#files tbody tr:not(.pad)').length > 10")
        rows = browser.value("[...document.querySelectorAll('#files tbody tr:not(.pad)')].map((row) => row.innerText)")
        assert [row for row in rows if "cpu.shares" in row]
        assert all(("2048 shares" in row or "1024 shares" in row) == ("cpu.shares" in row) for row in rows)
        for file, text, shown in (
            ("cpu.weight", "39", "weight 39"),
            ("io.weight", "default 100", "default 100"),
            ("blkio.bfq.weight", "10", "weight 10"),
            ("cpu.cfs_quota_us", "-1", "no limit"),
            ("cpu.cfs_quota_us", "40000", "40000 µs"),
            ("memory.limit_in_bytes", "9223372036854771712", "no limit"),
            ("memory.max", "1048576", "1048576 B"),
            ("cpuset.cpus", "3", "3"),
        ):
            assert browser.value(f"amount({file!r}, {text!r})") == shown
        assert browser.value("amount('cpu.weight', null)") == "\u2013"


def test_a_closed_port_says_how_to_open_the_page(browser: Browser) -> None:
    with served(MadeNode(1), state_over_tcp=False) as url:
        browser.open(url)
        browser.until("document.getElementById('notice').innerText.includes('state_over_tcp')")
        text = browser.value("document.getElementById('notice').innerText")
        assert "ssh -N -L 9471:/run/bypassd/reader.sock" in text
        # The readiness is a request of its own.
        browser.until("document.getElementById('ready').textContent === 'ready'")


def test_a_token_opens_the_page(browser: Browser, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("0123456789abcdef")
    with served(MadeNode(1), token_file=str(tmp_path / "token")) as url:
        browser.open(url)
        browser.until("document.querySelector('#notice input')")
        browser.value("document.querySelector('#notice input').value = '0123456789abcdef'")
        browser.value("document.querySelector('#notice button').click()")
        browser.until(READY)


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [360, 700, 1280, 2000])
def test_no_width_scrolls_sideways_and_text_has_contrast(browser: Browser, width: int, *, dark: bool) -> None:
    browser.size(width, 800, dark=dark)
    with served(MadeNode(30, HOSTILE)) as url:
        opened(browser, url)
        assert browser.value("document.documentElement.scrollWidth") <= width
        assert browser.value(CONTRAST) >= 4.5


@pytest.mark.parametrize("width", [360, 390, 650, 770, 1000, 1600])
def test_at_every_width_a_pods_name_can_be_read_and_no_column_is_cut(browser: Browser, width: int) -> None:
    browser.size(width, 800)
    with served(MadeNode(30)) as url:
        opened(browser, url)
        browser.value("[...document.querySelectorAll('button')].find((b) => b.textContent === 'Load').click()")
        browser.until(
            "document.querySelectorAll('#files tbody tr:not(.pad)').length && !document.querySelector('#files').hidden"
        )
        for table in ("#podlist", "#files"):
            assert browser.value(f"document.querySelector('{table} th').offsetWidth") >= 90
            box = f"document.querySelector('{table}')"
            assert browser.value(f"document.querySelector('{table} table').offsetWidth <= {box}.clientWidth")
            ends = (
                f"Math.max(...[...document.querySelectorAll('{table} th')].map((h) => h.getBoundingClientRect().right))"
            )
            assert browser.value(f"{ends} <= {box}.getBoundingClientRect().right")


CONTRAST = """(() => {
  const probe = (name) => {
    const e = document.createElement('i'); e.style.color = `var(--${name})`; document.body.append(e);
    const [r, g, b] = getComputedStyle(e).color.match(/[\\d.]+/g).slice(0, 3).map((n) => n / 255)
      .map((n) => n <= .03928 ? n / 12.92 : ((n + .055) / 1.055) ** 2.4);
    e.remove(); return .2126 * r + .7152 * g + .0722 * b; };
  const ratio = (a, b) => (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
  return Math.min(...['text', 'dim', 'bad', 'warn', 'good'].map((name) => ratio(probe(name), probe('panel'))));
})()"""


def test_an_update_changes_the_document_only_where_values_changed(browser: Browser) -> None:
    with served(MadeNode(500)) as url:
        opened(browser, url)
        browser.until("state.rates.get([...state.rates.keys()][0]).use !== undefined")
        browser.value(
            "window.changed = {nodes: 0}; new MutationObserver((list) => { for (const m of list)"
            " changed.nodes += m.addedNodes.length + m.removedNodes.length; })"
            ".observe(document.querySelector('#podlist tbody'), {childList: true})"
        )
        at = browser.value("state.at")
        browser.until(f"state.at > {at}")
        assert browser.value("changed.nodes") == 0
