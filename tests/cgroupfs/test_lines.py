"""Only a line feed ends a line of the kernel's: no name of a process, a group or a mount makes one of its own."""

import ast
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from cgroupfs.attribution import WriterKind, identify
from cgroupfs.lines import lines_of, stat_fields, stat_name, stat_numbers, status_field, status_mask
from cgroupfs.pressure import has_sys_resource
from reconciler.cli.nodeview import has_capability
from reconciler.responses.means.notice import _handles
from reconciler.runtime.own_weight import cpu_group
from reconciler.sources.host_processes import find_host_process
from tests.sourcetrees import ROOT, nodes, product

SEPARATORS = ("\r", "\v", "\f", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029", "\r\t")


def status(name: str, *, uid: int = 1000, mask: str = "0") -> str:
    """As the kernel shows a process, its name first: at most fifteen bytes of it, which no reader relies on."""
    return f"Name:\t{name}\nUmask:\t0022\nUid:\t{uid}\t{uid}\t{uid}\t{uid}\nSigCgt:\t{mask}\nCapEff:\t{mask}\n"


def place(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode())


def test_lines_are_those_between_line_feeds() -> None:
    assert lines_of("") == []
    assert lines_of("a\n") == lines_of("a") == ["a"]
    assert lines_of("a\n\nb\r\n") == ["a", "", "b\r"]
    assert lines_of(b"a\rb\n") == [b"a\rb"]
    assert lines_of("".join(SEPARATORS)) == ["".join(SEPARATORS)]


@pytest.mark.parametrize("separator", SEPARATORS)
def test_a_field_of_a_status_is_the_kernels(separator: str) -> None:
    text = status(f"x{separator}Uid:\t0\t0\t0\t0{separator}CapEff:\tff")
    assert status_field(text, "Uid:").split() == ["1000"] * 4
    assert status_field(text.encode(), b"Uid:").split() == [b"1000"] * 4
    assert status_mask(text, "CapEff:") == 0
    assert not has_sys_resource(status(f"x{separator}CapEff:\t{'f' * 16}"))


@pytest.mark.parametrize("text", ["", "CapEff:\n", "CapEff:\t-1\n", "CapEff:\t0x1\n", f"CapEff:\t{'f' * 99}\n"])
def test_what_is_no_mask_is_none(text: str) -> None:
    assert status_mask(text, "CapEff:") == 0


REST = "S 1 7 7 34816 -1 4194560 1 2 3 4 5 6 7 8 20 0 3 0 12345 1000 42 18446744073709551615"


@pytest.mark.parametrize(
    "name", ["x", "", "a b", "(", ")", ") (", f") {REST}"[:15], f"x) {REST}\n7 (x", "a\n8 (b) R 1", "\x1c\u2028\x85\v"]
)
def test_a_process_chooses_its_name_in_stat_and_nothing_else(name: str) -> None:
    text = f"7 ({name}) {REST} 0 0 0\n"
    assert (stat_name(text), *stat_fields(text)[:5]) == (name, "S", "1", "7", "7", "34816")
    assert stat_numbers(text, 4, 9, 14, 15, 22, 24) == [1, 4194560, 5, 6, 12345, 42]


def test_the_fields_of_a_thread_with_a_hostile_name_are_the_kernels() -> None:
    texts: list[str] = []

    def named() -> None:
        Path("/proc/thread-self/comm").write_bytes(b"a) R 1\n7 (b")
        texts.append(Path("/proc/thread-self/stat").read_text())

    thread = threading.Thread(target=named)
    thread.start()
    thread.join()
    assert (stat_name(texts[0]), stat_fields(texts[0])[0]) == ("a) R 1\n7 (b", "R")
    assert stat_numbers(texts[0], 4) == [os.getppid()]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "7 (x) S 1",
        f"7 (x {REST}",
        f"7 ({'x' * 4096}) {REST}",
        f"7 (x) {' '.join(REST.split()[:19])}",
        f"7 ({REST}"[:60],
    ],
)
def test_another_text_than_a_line_of_stat_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        stat_fields(text)


@pytest.mark.parametrize("word", ["-1", "x", "1_0", "٣", "+1", "0x1", "9" * 21])
def test_a_field_other_than_a_number_is_refused(word: str) -> None:
    with pytest.raises(ValueError):
        stat_numbers(f"7 (x) S {word} {REST}", 4)


def test_a_field_that_is_missing_is_refused() -> None:
    text = f"7 (x) {' '.join(REST.split()[:21])}"
    assert stat_numbers(text, 22) == [12345]
    with pytest.raises(ValueError):
        stat_numbers(text, 24)


def writer(root: Path, separator: str) -> bool:
    """A user's process named as a runtime, in a service."""
    place(root, "proc/7/comm", "runc\n")
    place(root, "proc/7/status", status(f"x{separator}Uid:\t0\t0\t0\t0"))
    place(root, "proc/7/cgroup", "0::/system.slice/a.service\n")
    for name in ("7/ns", "1/ns"):
        (root / "proc" / name).mkdir(parents=True)
        os.symlink("user:[1]", root / "proc" / name / "user")
    return identify(7, str(root)).kind is WriterKind.RUNTIME


def persons_group(root: Path, separator: str) -> bool:
    """A service's process in a group whose name has the row of a session."""
    place(root, "proc/7/comm", "worker\n")
    place(root, "proc/7/cgroup", f"1:name=systemd:/a.service\n0::/a{separator}1:name=systemd:/user.slice\n")
    return identify(7, str(root)).kind is WriterKind.PERSON


def kubelet(root: Path, separator: str) -> bool:
    place(root, "proc/7/cmdline", "kubelet\0")
    place(root, "proc/7/stat", "7 (x) S " + "0 " * 30)
    place(root, "proc/7/status", status(f"x{separator}Uid:\t0\t0\t0\t0"))
    for pid in (1, 7):
        (root / f"proc/{pid}/ns").mkdir(parents=True)
        os.symlink(f"user:[{pid}]", root / f"proc/{pid}/ns/user")
    # Of another user's process the command line is not read, so that it has no kubelet's name.
    return find_host_process(root=str(root), copied=False).rejections > 0


def capability(root: Path, separator: str) -> bool:
    place(root, "proc/self/status", status(f"x{separator}CapEff:\t{'f' * 16}"))
    return has_capability(str(root), 21)


def handler(root: Path, separator: str) -> bool:
    place(root, "proc/7/status", status(f"x{separator}SigCgt:\t{'f' * 16}"))
    return _handles(f"{root}/proc", 7, 15)


def own(root: Path, separator: str) -> bool:
    place(root, "cgroup", f"4:memory:/a{separator}3:cpu:/b\n")
    return cpu_group((root / "cgroup").read_bytes().decode(), 1) is not None


@pytest.mark.parametrize("separator", SEPARATORS)
@pytest.mark.parametrize("reader", [writer, persons_group, kubelet, capability, handler, own])
def test_no_name_makes_a_line_for_any_reader(
    tmp_path: Path, reader: Callable[[Path, str], bool], separator: str
) -> None:
    assert not reader(tmp_path, separator)


@pytest.mark.parametrize("reader", [writer, persons_group, capability, handler, own])
def test_a_line_of_the_kernels_own_is_read(tmp_path: Path, reader: Callable[[Path, str], bool]) -> None:
    assert reader(tmp_path, "\n")


# Texts of one author: bypassd's own, or root's configuration, whose format has other line ends too.
MAY_SPLIT = {
    "reconciler/cli/checks/agent.py": "messages of the configuration",
    "reconciler/cli/completion.py": "a script of bypassctl's own",
    "reconciler/cli/main.py": "help of bypassctl's own",
    "reconciler/config/presets.py": "the configuration, as YAML has lines",
    "reconciler/runtime/streams.py": "messages of bypassctl's own",
    "reconciler/sources/kubelet_arguments.py": "units and argument files of root's, as systemd has lines",
}


def test_no_module_splits_lines_in_another_way() -> None:
    """Also not by a file that is opened with universal line ends."""
    split, opened = set(), []
    for path in product():
        for node in nodes(path):
            if not isinstance(node, ast.Call):
                continue
            if isinstance(node.func, ast.Attribute) and node.func.attr == "splitlines":
                split.add(str(path.relative_to(ROOT)))
            if isinstance(node.func, ast.Name) and node.func.id == "open":
                names = {keyword.arg for keyword in node.keywords}
                mode = node.args[1].value if len(node.args) > 1 and isinstance(node.args[1], ast.Constant) else "r"
                if mode == "r" and "newline" not in names:
                    opened.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert split == MAY_SPLIT.keys()
    assert opened == []
