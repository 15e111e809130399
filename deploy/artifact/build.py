#!/usr/bin/env python3
"""Build the self-contained tree and its tarball: ``build.py --output DIRECTORY``, or ``build.py --lock``.

The tree has its own interpreter, C library and loader (Debian 12's, by `runtime.lock`: name, version and SHA-256 of
each package), our packages with what they need (by requirements/runtime.txt, hashes too), all compiled, the launcher
(launch.c), the unit, the configuration, documents and the installer. Nothing of the machine that builds gets in, so two
builds of one commit give the same bytes: files are sorted, owned by root, and as old as the commit
(SOURCE_DATE_EPOCH, else the commit's time).

Needs Debian 12 on x86-64 with apt, dpkg-deb and gcc, and Python 3.11 with pip. Exit codes: 0 built; 1 something could
not be fetched or has another hash than the lock says; 2 usage.
"""

import argparse
import gzip
import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import manual

HERE: Final = Path(__file__).resolve().parent
REPOSITORY: Final = HERE.parent.parent
LOCK: Final = HERE / "runtime.lock"
REQUIREMENTS: Final = REPOSITORY / "requirements/runtime.txt"
PREFIX: Final = "/opt/bypassd"
"""Where the compiled code says that it lies; tracebacks name it, nothing looks there."""
PACKAGES: Final = (
    *("python3.11-minimal", "libpython3.11-minimal", "libpython3.11-stdlib", "libc6", "zlib1g", "libexpat1", "libssl3"),
    *("libffi8", "libsqlite3-0", "libuuid1", "libbz2-1.0", "liblzma5", "libcrypt1", "libstdc++6", "libgcc-s1"),
    # For the licence of the two before it only.
    "gcc-12-base",
)
LOADER: Final = "ld-linux-x86-64.so.2"
LIBRARIES: Final = ("lib/x86_64-linux-gnu", "usr/lib/x86_64-linux-gnu", "lib64")
NOT_NEEDED: Final = frozenset(
    {
        *("idlelib", "lib2to3", "pydoc_data", "test", "tkinter", "turtledemo", "ensurepip", "venv"),
        *("curses", "turtle.py", "EXTERNALLY-MANAGED"),
    }
)
"""Of the standard library, at its top. `check_imports` says when one is missed."""
NO_LIBRARY: Final = ("_curses", "_curses_panel", "readline", "_dbm", "_gdbm", "_tkinter", "nis", "_ctypes_test")
"""Extension modules whose C libraries are left out."""
OURS: Final = ("cgroupfs", "resctrl", "state", "reconciler")
NOT_SHIPPED: Final = frozenset({"reconciler/cli/completion.py"})
"""Generators of files in the repository, which need packages of development."""
SHARED: Final = {
    "deploy/config.yaml": "share/bypassd/config.yaml",
    "deploy/alert-rules.yaml": "share/bypassd/alert-rules.yaml",
    "deploy/grafana-dashboard.json": "share/bypassd/grafana-dashboard.json",
    "deploy/completion/bypassctl.bash": "share/bypassd/completion/bypassctl.bash",
    "deploy/completion/bypassctl.fish": "share/bypassd/completion/bypassctl.fish",
    "deploy/completion/_bypassctl": "share/bypassd/completion/_bypassctl",
    "LICENSE": "share/bypassd/LICENSE",
    "README.md": "share/bypassd/README.md",
    "CHANGELOG.md": "share/bypassd/CHANGELOG.md",
    "requirements/runtime.txt": "share/bypassd/requirements.txt",
    "deploy/artifact/runtime.lock": "share/bypassd/runtime.lock",
}
IMPORTS: Final = """
import importlib, pkgutil, sys
sys.path[:0] = {paths}
for name in {packages}:
    package = importlib.import_module(name)
    for module in pkgutil.walk_packages(package.__path__, name + "."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
import ssl
files = {{getattr(module, "__file__", None) for module in sys.modules.values()}}
print(*sorted(filter(None, files)), sep="\\n")
"""
"""Run by a finished tree: it must import every module of ours, whose own imports may be late, and prints all files."""


class Package(NamedTuple):
    """One Debian package of the lock."""

    name: str
    version: str
    sha256: str


class BuildError(Exception):
    """Why there is no artifact, in one line."""


def run(*command: str, cwd: Path | None = None, environ: dict[str, str] | None = None) -> str:
    """Run a program; its standard output. Errors: `BuildError` with what it said."""
    done = subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"{' '.join(command[:4])} ...: exit {done.returncode}: {done.stderr.strip()[-800:]}")
    return done.stdout


def read_lock(text: str) -> list[Package]:
    """The packages of the lock. Errors: `BuildError` for a line of another form, with its number."""
    packages = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line or line.startswith("#"):
            continue
        match = re.fullmatch(r"([a-z0-9.+-]+)=(\S+) sha256:([0-9a-f]{64})", line)
        if match is None:
            raise BuildError(f"{LOCK.name}:{number}: {line!r}: expected NAME=VERSION sha256:DIGITS")
        packages.append(Package(*match.groups()))
    return packages


def write_lock() -> None:
    """Pin what this machine's apt would install now."""
    lines = [
        "# Debian 12 packages of the artifact's interpreter. Written by `make artifact-lock`; do not edit.",
    ]
    for name in PACKAGES:
        fields = run("apt-cache", "show", "--no-all-versions", name)
        version, digest = (re.search(rf"^{key}: (.*)$", fields, re.MULTILINE) for key in ("Version", "SHA256"))
        if version is None or digest is None:
            raise BuildError(f"apt knows no {name}: run apt-get update on Debian 12")
        lines.append(f"{name}={version[1]} sha256:{digest[1]}")
    LOCK.write_text("\n".join(lines) + "\n")


def fetch(package: Package, cache: Path) -> Path:
    """The package's file, from the cache or through apt. Errors: `BuildError`, for another hash than the lock's too."""
    path = cache / f"{package.name}_{package.sha256[:16]}.deb"
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            try:
                run("apt-get", "download", "-q", f"{package.name}={package.version}", cwd=Path(scratch))
            except BuildError as exc:
                raise BuildError(f"{exc}\n(a version that Debian has replaced: run make artifact-lock)") from exc
            (found,) = Path(scratch).iterdir()
            found.rename(path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest != package.sha256:
        path.unlink()
        raise BuildError(f"{package.name}: its SHA-256 is {digest}, the lock says {package.sha256}")
    return path


def add_runtime(tree: Path, cache: Path) -> None:
    """The interpreter, its standard library, the C library and the loader."""
    with tempfile.TemporaryDirectory() as scratch:
        for package in read_lock(LOCK.read_text()):
            root = Path(scratch, package.name)
            run("dpkg-deb", "-x", str(fetch(package, cache)), str(root))
            add_package(root, tree)
        add_licences(Path(scratch), tree)
    library = tree / "lib/python3.11"
    for path in list(library.iterdir()):
        if path.name in NOT_NEEDED or path.name.startswith("config-3.11"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for path in list((library / "lib-dynload").iterdir()):
        if path.name.split(".")[0] in NO_LIBRARY or path.name.startswith(("_test", "_xx", "xx")):
            path.unlink()
    # Debian's own additions look for things of the host's.
    (library / "sitecustomize.py").unlink(missing_ok=True)


def add_package(root: Path, tree: Path) -> None:
    """What of an unpacked Debian package belongs into the tree."""
    for folder in LIBRARIES:
        for path in sorted((root / folder).glob("*.so*")):
            # By the name that programs ask for: a link's target is copied under it, so the tree has no links.
            if path.is_file() and (path.is_symlink() or not any_link_to(path)):
                target = tree / "lib" / path.name
                shutil.copy(path.resolve(), target)
                target.chmod(0o755)
    if (root / "usr/bin/python3.11").exists():
        (tree / "bin").mkdir(exist_ok=True)
        shutil.copy(root / "usr/bin/python3.11", tree / "bin/python3.11")
    if (root / "usr/lib/python3.11").is_dir():
        shutil.copytree(
            root / "usr/lib/python3.11", tree / "lib/python3.11", dirs_exist_ok=True, ignore_dangling_symlinks=True
        )


def add_licences(roots: Path, tree: Path) -> None:
    """The licence of each package below ``roots``, which are unpacked. Errors: `BuildError` for one without it."""
    for root in sorted(roots.iterdir()):
        document = root / "usr/share/doc" / root.name
        # A package of the same source may have it instead.
        owner = document.readlink().name if document.is_symlink() else root.name
        licence = roots / owner / "usr/share/doc" / owner / "copyright"
        if not licence.is_file():
            raise BuildError(f"{root.name}: no {licence.relative_to(roots)}: add the package that has it to PACKAGES")
        target = tree / "share/bypassd/licenses" / root.name
        target.mkdir(parents=True)
        shutil.copy(licence, target / "copyright")


def any_link_to(path: Path) -> bool:
    """Whether a link beside a file leads to it."""
    return any(other.is_symlink() and other.resolve() == path.resolve() for other in path.parent.iterdir())


def add_python_packages(tree: Path) -> None:
    """What we need from the package index, by hash, as wheels only: nothing is compiled here."""
    target = tree / "lib/bypassd/packages"
    run(
        *(
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "--no-compile",
            "--no-deps",
        ),
        *("--require-hashes", "--only-binary=:all:", "--implementation=cp", "--python-version=3.11", "--abi=cp311"),
        *("--abi=abi3", "--abi=none", "--platform=manylinux_2_28_x86_64", "--platform=manylinux_2_17_x86_64"),
        *("--platform=manylinux2014_x86_64", "--platform=manylinux_2_12_x86_64", "--platform=manylinux2010_x86_64"),
        *("--platform=any", f"--target={target}", "-r", str(REQUIREMENTS)),
    )
    shutil.rmtree(target / "bin", ignore_errors=True)
    for info in target.glob("*.dist-info"):
        for name in ("RECORD", "INSTALLER", "REQUESTED", "direct_url.json", "WHEEL"):
            (info / name).unlink(missing_ok=True)
    for folder in (*target.rglob("tests"), *target.rglob("test")):
        if folder.is_dir():
            shutil.rmtree(folder)


def add_ours(tree: Path) -> None:
    """Our packages as git has them, the programs and the shared files."""
    names = run("git", "-C", str(REPOSITORY), "ls-files", "-z", *OURS).split("\0")
    for name in sorted({*filter(None, names)} - NOT_SHIPPED):
        target = tree / "lib/bypassd/bypassd" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, target)
    shutil.copy(REPOSITORY / "deploy/bypassd_main.py", tree / "lib/bypassd/bypassd_main.py")
    shutil.copy(HERE / "run.py", tree / "lib/bypassd/run.py")
    for source, place in SHARED.items():
        target = tree / place
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / source, target)
    for path in sorted((REPOSITORY / "docs").glob("*.md")):
        target = tree / "share/bypassd/docs" / path.name
        target.parent.mkdir(exist_ok=True)
        shutil.copy(path, target)
    date = time.strftime("%Y-%m-%d", time.gmtime(commit_time()))
    for page in ("bypassd.8", "bypassctl.1"):
        target = tree / f"share/man/man{page[-1]}" / page
        target.parent.mkdir(parents=True)
        text = (REPOSITORY / f"docs/{page}.md").read_text()
        target.write_text(manual.roff(text, date, f"bypassd {version()}"))
    (tree / "share/man/man1/state-dump.1").write_text(".so man1/bypassctl.1\n")
    unit = (REPOSITORY / "deploy/bypassd.service").read_text()
    (tree / "share/bypassd/bypassd.service").write_text(unit)
    shutil.copy(HERE / "install.sh", tree / "install.sh")


def add_launcher(tree: Path) -> None:
    """The programs: one small file under four names."""
    launcher = tree / "bin/bypassd"
    run(
        *("gcc", "-Os", "-static", "-nostdlib", "-nostartfiles", "-ffreestanding", "-fno-stack-protector", "-fno-pie"),
        *("-no-pie", "-fno-asynchronous-unwind-tables", "-Wl,--build-id=none", "-Wl,-z,noexecstack", "-s", "-Wall"),
        *("-fno-ident", "-Wextra", "-Werror", "-o", str(launcher), "launch.c"),
        cwd=HERE,
    )
    for name in ("bypassctl", "state-dump", "bypassd-python"):
        shutil.copy(launcher, tree / "bin" / name)


def compile_all(tree: Path) -> None:
    """Byte code beside each source, good for ever whatever the files' times are."""
    for old in list(tree.rglob("__pycache__")):
        shutil.rmtree(old)
    # By the tree's own interpreter, which will read it: the one that builds may be another 3.11.
    run(
        *(str(tree / "bin/bypassd-python"), "-I", "-B", "-m", "compileall", "-q", "-r", "30", "-o", "2"),
        *("-s", str(tree), "-p", PREFIX, "--invalidation-mode", "unchecked-hash", str(tree / "lib")),
        environ={},
    )


def check_libraries(tree: Path) -> None:
    """Every library that a file asks for is in the tree. Errors: `BuildError` naming the first that is not."""
    present = {path.name for path in (tree / "lib").iterdir()}
    bundled = {path.name for path in tree.rglob("*.so*")}
    for path in sorted(tree.rglob("*")):
        if path.is_file() and path.read_bytes()[:4] == b"\x7fELF":
            for name in re.findall(r"NEEDED\s+(\S+)", run("objdump", "-p", str(path))):
                if name not in present and name not in bundled:
                    raise BuildError(f"{path.relative_to(tree)} needs {name}, which is not in the tree")


def check_imports(tree: Path) -> None:
    """The tree's interpreter imports our programs, from the tree alone and with an empty environment."""
    paths = [str(tree / "lib/bypassd" / name) for name in ("bypassd", "packages")]
    code = IMPORTS.format(paths=paths, packages=OURS)
    output = run(str(tree / "bin/bypassd-python"), "-I", "-OO", "-B", "-c", code, environ={})
    outside = [name for name in output.split() if not name.startswith(str(tree))]
    if outside:
        raise BuildError(f"imported from outside of the tree: {outside[0]}")


def add_build_id(tree: Path) -> None:
    """What tells one build from another, for the installer: version, commit, and a digest of every other file."""
    digest = hashlib.sha256()
    for path in sorted(tree.rglob("*")):
        if path.is_file():
            digest.update(f"{path.relative_to(tree)}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\0".encode())
    commit = run("git", "-C", str(REPOSITORY), "rev-parse", "HEAD").strip()
    text = f"version {version()}\ncommit {commit}\nsha256 {digest.hexdigest()}\n"
    (tree / "share/bypassd/build-id").write_text(text)


def commit_time() -> int:
    """Seconds since 1970 that every file of the tree is given."""
    given = os.environ.get("SOURCE_DATE_EPOCH", "")
    return int(given) if given else int(run("git", "-C", str(REPOSITORY), "log", "-1", "--format=%ct").strip())


def entries(tree: Path, top: str, when: int) -> Iterator[tuple[tarfile.TarInfo, bytes | None]]:
    """The members of the archive in their order: rights are 755 or 644, whatever the umask is."""
    for path in (tree, *sorted(tree.rglob("*"))):
        relative = path.relative_to(tree)
        info = tarfile.TarInfo(f"{top}/{relative}" if relative.parts else top)
        info.mtime, info.uname, info.gname = when, "root", "root"
        if path.is_dir():
            info.type, info.mode = tarfile.DIRTYPE, 0o755
            yield info, None
            continue
        data = path.read_bytes()
        runs = path.parent == tree / "bin" or path.name in {"install.sh", LOADER}
        info.size, info.mode = len(data), 0o755 if runs else 0o644
        yield info, data


def pack(tree: Path, output: Path, top: str, when: int) -> None:
    """The tarball; gzip, because every host can read it."""
    scratch = output.with_suffix(".part")
    with (
        scratch.open("wb") as raw,
        gzip.GzipFile("", "wb", 9, raw, when) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for info, data in entries(tree, top, when):
            archive.addfile(info, None if data is None else io.BytesIO(data))
    scratch.rename(output)


def version() -> str:
    """The version that pyproject.toml has."""
    match = re.search(r'^version = "([^"]+)"$', (REPOSITORY / "pyproject.toml").read_text(), re.MULTILINE)
    if match is None:
        raise BuildError("pyproject.toml has no version")
    return match[1]


def build_tree(tree: Path, cache: Path) -> None:
    """The finished tree, at a path that does not exist yet; each kind of artifact packs this one.

    ``cache`` is the directory of fetched Debian packages; it is made. Errors: `BuildError`.
    """
    cache.mkdir(parents=True, exist_ok=True)
    (tree / "lib").mkdir(parents=True)
    add_runtime(tree, cache)
    add_python_packages(tree)
    add_ours(tree)
    add_launcher(tree)
    compile_all(tree)
    check_libraries(tree)
    check_imports(tree)
    add_build_id(tree)


def build(output: Path, cache: Path) -> Path:
    """The tarball. Errors: `BuildError`."""
    output.mkdir(parents=True, exist_ok=True)
    name = f"bypassd-{version()}-linux-x86_64"
    with tempfile.TemporaryDirectory(dir=output) as scratch:
        tree = Path(scratch, name)
        build_tree(tree, cache)
        result = output / f"{name}.tar.gz"
        pack(tree, result, name, commit_time())
    digest = hashlib.sha256(result.read_bytes()).hexdigest()
    result.with_name(f"{result.name}.sha256").write_text(f"{digest}  {result.name}\n")
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """The program."""
    options = argparse.ArgumentParser(description="Build the self-contained tarball.")
    options.add_argument("--output", type=Path, default=REPOSITORY / "dist", help="directory of the tarball")
    options.add_argument("--cache", type=Path, default=REPOSITORY / "dist/cache", help="directory of fetched packages")
    options.add_argument("--lock", action="store_true", help="pin the present Debian packages and build nothing")
    given = options.parse_args(arguments)
    try:
        if given.lock:
            write_lock()
            return 0
        result = build(given.output.resolve(), given.cache.resolve())
    except (BuildError, manual.ManualError) as exc:
        print(f"build.py: {exc}", file=sys.stderr)
        return 1
    print(f"{result} ({result.stat().st_size / 2**20:.1f} MiB)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
