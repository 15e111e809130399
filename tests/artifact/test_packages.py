"""The Debian and the RPM package: the same bytes twice, the tarball's tree, and scripts that keep their promises.

`make artifact-test` builds them beside the tarball and runs this. The scripts are tested with small packages of several
versions, made by the same programs from a tarball whose programs are stubs.
"""

import hashlib
import io
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.artifact.host import Host
from tests.artifact.test_tarball import AGAIN, TARBALL, run

ROOT = Path(__file__).parents[2]
MAKERS = ROOT / "deploy/artifact"
CONFIG = "etc/bypassd/config.yaml"
STORE = "var/lib/bypassd/state.db"
UNRESTORED = "var/lib/bypassd/unrestored"
PROGRAM = """\
#!/bin/sh
echo "bypassctl $*" >>/stub/log
case $1 in
config) echo "store.path = /var/lib/bypassd/state.db   [default]" ;;
restore) exit "$(cat /stub/restore 2>/dev/null || echo 0)" ;;
esac
"""
pytestmark = pytest.mark.skipif(not TARBALL, reason="PACKAGES NOT TESTED: make artifact-test builds them and runs this")


def needed(*programs: str) -> None:
    for program in programs:
        if shutil.which(program) is None:
            pytest.skip(f"NOT RUN: {program} is not installed")


def made(tarball: str, kind: str) -> Path:
    """The package that was built beside a tarball."""
    version = Path(tarball).name.split("-")[1]
    name = f"bypassd_{version}-1_amd64.deb" if kind == "deb" else f"bypassd-{version}-1.x86_64.rpm"
    path = Path(tarball).with_name(name)
    if not path.exists():
        pytest.skip(f"NOT RUN: there is no {path}")
    return path


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize("kind", ["deb", "rpm"])
def test_two_builds_give_the_same_bytes(kind: str) -> None:
    if not AGAIN:
        pytest.skip("NOT RUN: no second build (BYPASSD_ARTIFACT_AGAIN)")
    assert sha256(made(TARBALL, kind).read_bytes()) == sha256(made(AGAIN, kind).read_bytes())


def members(data: bytes) -> dict[str, tarfile.TarInfo]:
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        return {item.name.removeprefix("./"): item for item in archive.getmembers()}


def unpacked(kind: str, place: Path) -> Path:
    """The files of a built package."""
    place.mkdir()
    if kind == "deb":
        run("dpkg-deb", "-x", made(TARBALL, kind), place)
    else:
        needed("rpm2cpio", "cpio")
        cpio = subprocess.run(["rpm2cpio", made(TARBALL, kind)], capture_output=True, check=True).stdout
        subprocess.run(["cpio", "-idm", "--quiet"], input=cpio, cwd=place, check=True)
    return place


@pytest.mark.parametrize("kind", ["deb", "rpm"])
def test_it_has_the_tree_of_the_tarball(kind: str, tmp_path: Path) -> None:
    with tarfile.open(TARBALL) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(tmp_path / "tarball")
    (tree,) = (tmp_path / "tarball").iterdir()
    root = unpacked(kind, tmp_path / "root")

    def files(top: Path) -> dict[str, str]:
        return {
            str(path.relative_to(top)): f"{path.stat().st_mode & 0o777:o} {sha256(path.read_bytes())}"
            for folder in ("bin", "lib", "share/bypassd/licenses")
            for path in (top / folder).rglob("*")
            if path.is_file()
        }

    assert files(root / "usr/lib/bypassd") == files(tree)
    build = "share/bypassd/build-id"
    assert (root / "usr/lib/bypassd" / build).read_bytes() == (tree / build).read_bytes()
    assert (root / CONFIG).read_bytes() == (tree / "share/bypassd/config.yaml").read_bytes()
    assert (root / CONFIG).stat().st_mode & 0o777 == 0o600
    unit = root / ("lib" if kind == "deb" else "usr/lib") / "systemd/system/bypassd.service"
    assert "ExecStart=/usr/lib/bypassd/bin/bypassd run\n" in unit.read_text()
    assert "/opt/bypassd/" not in re.sub(r"^#.*$", "", unit.read_text(), flags=re.MULTILINE)
    for name in ("bypassd", "bypassctl", "state-dump"):
        assert (root / "usr/bin" / name).resolve() == root / "usr/lib/bypassd/bin" / name
    pages = {path.name for path in (root / "usr/share/man").rglob("*.gz")}
    assert pages == {"bypassd.8.gz", "bypassctl.1.gz", "state-dump.1.gz"}
    assert all(path.read_bytes()[4:8] == bytes(4) for path in root.rglob("*.gz")), "gzip has a time of its own"
    assert {path.name for path in (tree / "share/bypassd/docs").iterdir()} < {
        path.name for path in (root / "usr/share/doc/bypassd").iterdir()
    }


def test_the_debian_package_can_be_read_by_old_dpkg_and_is_roots() -> None:
    names = run("ar", "t", made(TARBALL, "deb")).split()
    assert names == ["debian-binary", "control.tar.xz", "data.tar.xz"]
    data = subprocess.run(["dpkg-deb", "--fsys-tarfile", made(TARBALL, "deb")], capture_output=True, check=True).stdout
    items = members(data)
    assert {(item.uid, item.gid) for item in items.values()} == {(0, 0)}
    assert len({item.mtime for item in items.values()}) == 1
    assert {item.mode for name, item in items.items() if not item.issym() and name != CONFIG} == {0o755, 0o644}


def test_the_rpm_package_can_be_read_by_rpm_4_11() -> None:
    needed("rpm")
    package = made(TARBALL, "rpm")
    required = set(re.findall(r"rpmlib\((\w+)\)", run("rpm", "-qp", "--requires", package)))
    assert required == {"CompressedFileNames", "FileDigests", "PayloadFilesHavePrefix", "PayloadIsXz"}
    form = "%{PAYLOADCOMPRESSOR} %{FILEDIGESTALGO} %{BUILDHOST}"
    assert run("rpm", "-qp", "--qf", form, package) == "xz 8 bypassd"
    owners = run("rpm", "-qp", "--qf", "[%{FILEUSERNAME}:%{FILEGROUPNAME}\n]", package)
    assert set(owners.split()) == {"root:root"}


def test_lintian_has_nothing_to_say() -> None:
    needed("lintian")
    done = subprocess.run(
        ["lintian", "--allow-root", "--fail-on", "error,warning", "--tag-display-limit", "0", made(TARBALL, "deb")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_each_override_has_its_reason() -> None:
    lines = (MAKERS / "packages/lintian-overrides").read_text().splitlines()
    assert all(line.startswith("bypassd: ") for line in lines[1::2])
    assert all(line.startswith("# ") for line in lines[::2])


def scripts(place: Path) -> list[Path]:
    """The scripts of both packages as they are in them."""
    run("dpkg-deb", "-e", made(TARBALL, "deb"), place)
    result = [place / name for name in ("preinst", "postinst", "prerm", "postrm")]
    for tag in ("PREIN", "POSTIN", "PREUN", "POSTUN", "POSTTRANS"):
        path = place / tag
        path.write_text("#!/bin/sh\n" + run("rpm", "-qp", "--qf", f"%{{{tag}}}", made(TARBALL, "rpm")))
        assert "refuse_tarball()" in path.read_text()
        result.append(path)
    return result


def test_the_scripts_are_posix_sh(tmp_path: Path) -> None:
    needed("rpm")
    for path in scripts(tmp_path / "control"):
        run("dash", "-n", path)
        if shutil.which("shellcheck"):
            assert run("shellcheck", "--shell=sh", "--severity=warning", path) == ""


Maker = Callable[[str, str], Path]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Maker:
    """Makes a small package of a kind and version."""
    place = tmp_path_factory.mktemp("small")
    with tarfile.open(TARBALL) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(
            place / "real",
            members=[item for item in archive if "/lib/" not in item.name and "/bin/" not in item.name],
        )
    (real,) = (place / "real").iterdir()

    def small(kind: str, version: str) -> Path:
        top = place / f"bypassd-{version}-linux-x86_64"
        if not top.exists():
            shutil.copytree(real, top)
            build = top / "share/bypassd/build-id"
            build.write_text(re.sub(r"^version .*$", f"version {version}", build.read_text(), flags=re.MULTILINE))
            example = top / "share/bypassd/config.yaml"
            example.write_text(f"# of {version}\n{example.read_text()}")
            for name in ("bypassd", "bypassctl", "state-dump"):
                (top / "bin").mkdir(exist_ok=True)
                (top / "bin" / name).write_text(PROGRAM)
                (top / "bin" / name).chmod(0o755)
            with tarfile.open(f"{top}.tar.gz", "w:gz") as archive:
                archive.add(top, top.name)
        program = "deb.py" if kind == "deb" else "rpm.py"
        output = place / kind / version
        run(sys.executable, MAKERS / program, f"{top}.tar.gz", "--output", output)
        (result,) = output.iterdir()
        return result

    return small


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    if subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode:
        pytest.skip("NOT RUN: mounting needs root")
    (tmp_path / "host").mkdir()
    machine = Host(tmp_path / "host")
    try:
        yield machine
    finally:
        machine.close()


def dpkg(host: Host, *arguments: str | Path, code: int = 0, **environ: str) -> str:
    # Without the host's own triggers, such as a new index of all manual pages.
    return host.run("dpkg", "--force-confold", "--force-unsafe-io", "--no-triggers", *arguments, code=code, **environ)


def status(host: Host) -> str:
    return host.run("dpkg-query", "-W", "-f", "${Status} ${Version}", "bypassd")


@pytest.fixture
def debian(host: Host, make: Maker) -> Host:
    """A host with version 1.0 installed and running, whose store has entries."""
    assert dpkg(host, "-i", host.take(make("deb", "1.0")))
    assert host.calls() == ["systemctl start bypassd.service"]
    (host.root / STORE).parent.mkdir(parents=True, exist_ok=True)
    (host.root / STORE).touch()
    return host


WANTED_BY = "etc/systemd/system/multi-user.target.wants/bypassd.service"


def test_debian_installs_enables_and_starts_what_observes(debian: Host) -> None:
    assert status(debian) == "install ok installed 1.0-1"
    assert debian.has(WANTED_BY)
    text = (debian.root / CONFIG).read_text()
    assert re.findall(r"^[^#]*mode: *\w+", text, re.MULTILINE) == []


def test_debian_upgrade_restarts_and_keeps_the_configuration(debian: Host, make: Maker) -> None:
    (debian.root / CONFIG).write_text("mode: enforce\n")
    dpkg(debian, "-i", debian.take(make("deb", "2.0")))
    assert debian.calls() == ["systemctl restart bypassd.service"]
    assert (debian.root / CONFIG).read_text() == "mode: enforce\n"
    assert status(debian).endswith(" 2.0-1")
    dpkg(debian, "-i", debian.take(make("deb", "1.0")))
    assert debian.calls() == ["systemctl restart bypassd.service"], "and back"


def test_debian_upgrade_starts_nothing_that_was_stopped_or_disabled(debian: Host, make: Maker) -> None:
    debian.set("active", None)
    (debian.root / WANTED_BY).unlink()
    dpkg(debian, "-i", debian.take(make("deb", "2.0")))
    assert debian.calls() == []
    assert not debian.has(WANTED_BY)
    assert not debian.has("run/bypassd.stopped")


def test_debian_upgrade_fails_when_the_new_version_does_not_start(debian: Host, make: Maker) -> None:
    debian.set("broken")
    said = dpkg(debian, "-i", debian.take(make("deb", "2.0")), code=1)
    assert "journalctl -u bypassd" in said
    assert status(debian) == "install ok half-configured 2.0-1"
    debian.set("broken", None)
    dpkg(debian, "-i", debian.take(make("deb", "1.0")))
    assert status(debian) == "install ok installed 1.0-1"


def test_debian_removal_stops_restores_and_keeps_configuration_and_store(debian: Host, make: Maker) -> None:
    dpkg(debian, "-r", "bypassd")
    assert debian.calls() == [
        "systemctl stop bypassd.service",
        "bypassctl config show store.path",
        "bypassctl restore",
    ]
    assert debian.has(CONFIG)
    assert debian.has(STORE)
    assert not debian.has("usr/lib/bypassd")
    dpkg(debian, "-i", "/bypassd_1.0-1_amd64.deb")
    assert debian.calls() == ["systemctl start bypassd.service"], "a new installation starts, whatever was before"


def test_debian_purge_leaves_nothing(debian: Host) -> None:
    dpkg(debian, "-P", "bypassd")
    assert "bypassctl restore" in debian.calls()
    assert debian.remains() == []


def test_debian_without_a_store_restores_nothing(debian: Host) -> None:
    (debian.root / STORE).unlink()
    debian.set("restore", "3")
    dpkg(debian, "-r", "bypassd")
    assert "bypassctl restore" not in debian.calls()


def test_debian_removes_nothing_when_a_value_is_not_restored_unless_forced(debian: Host) -> None:
    debian.set("restore", "1")
    said = dpkg(debian, "-r", "bypassd", code=1)
    assert said.count("BYPASSD_FORCE_REMOVE=1") == 1
    assert status(debian).endswith(" installed 1.0-1")
    assert debian.has("usr/lib/bypassd/bin/bypassctl")
    assert debian.calls()[-1] == "bypassctl restore", "and is not started again"
    dpkg(debian, "-r", "bypassd", BYPASSD_FORCE_REMOVE="1")
    assert debian.has(UNRESTORED)
    assert "BYPASSD_FORCE_REMOVE=1" in dpkg(debian, "-P", "bypassd", code=1)
    assert debian.has(STORE)
    dpkg(debian, "-P", "bypassd", BYPASSD_FORCE_REMOVE="1")
    assert debian.remains() == []


def test_debian_purges_after_a_later_installation_has_restored(debian: Host) -> None:
    debian.set("restore", "1")
    dpkg(debian, "-r", "bypassd", BYPASSD_FORCE_REMOVE="1")
    dpkg(debian, "-i", "/bypassd_1.0-1_amd64.deb")
    debian.set("restore", None)
    dpkg(debian, "-P", "bypassd")
    assert debian.remains() == []


STATES = (
    *(("preinst", "abort-upgrade 2.0-1"), ("postinst", "abort-upgrade 2.0-1"), ("postinst", "abort-remove")),
    *(("postinst", "abort-remove in-favour other 1"), ("postinst", "abort-deconfigure in-favour other 1")),
    *(("prerm", "upgrade 2.0-1"), ("prerm", "failed-upgrade 0.9-1"), ("prerm", "deconfigure in-favour other 1")),
    *(("postrm", "upgrade 2.0-1"), ("postrm", "failed-upgrade 0.9-1"), ("postrm", "abort-install 1.0-1")),
    *(("postrm", "abort-install"), ("postrm", "abort-upgrade 1.0-1"), ("postrm", "disappear other 1")),
)


def test_debian_scripts_do_nothing_to_a_running_service_in_every_other_state(debian: Host) -> None:
    for script, words in STATES:
        debian.run("dash", f"/var/lib/dpkg/info/bypassd.{script}", *words.split())
    for script in ("preinst", "postinst", "prerm", "postrm"):
        if script == "preinst":  # dpkg keeps it, too
            assert debian.has("var/lib/dpkg/info/bypassd.preinst")
        debian.run("dash", f"/var/lib/dpkg/info/bypassd.{script}", "unknown", code=1)
    assert debian.calls() == []
    assert debian.has(STORE)
    assert debian.has("usr/lib/bypassd/bin/bypassctl")


def test_debian_installs_into_a_directory_without_touching_the_host(host: Host, make: Maker) -> None:
    (host.root / "image/var/lib/dpkg").mkdir(parents=True)
    (host.root / "image/var/lib/dpkg/status").touch()
    image = ("--root=/image", "--force-script-chrootless", "--force-not-root", "--log=/dev/null")
    dpkg(host, *image, "-i", host.take(make("deb", "1.0")))
    assert host.has(f"image/{WANTED_BY}")
    (host.root / "image" / STORE).parent.mkdir(parents=True)
    (host.root / "image" / STORE).touch()
    dpkg(host, *image, "-P", "bypassd")
    assert not host.has("image/usr/lib/bypassd")
    assert not host.has("image/var/lib/bypassd")
    assert host.calls() == []


@pytest.fixture
def tarball_host(host: Host) -> Host:
    """A host with the tarball in /srv/bypassd."""
    (host.root / "etc/systemd/system/bypassd.service").write_text("[Service]\nExecStart=/srv/bypassd/bin/bypassd run\n")
    (host.root / "srv/bypassd").mkdir(parents=True)
    (host.root / "srv/bypassd/install.sh").touch()
    return host


def test_packages_refuse_a_host_with_the_tarball(tarball_host: Host, make: Maker) -> None:
    said = dpkg(tarball_host, "-i", tarball_host.take(make("deb", "1.0")), code=1)
    assert "/srv/bypassd/install.sh --uninstall" in said
    needed("rpmbuild")
    said = tarball_host.run("rpm", "--nodeps", "-i", tarball_host.take(make("rpm", "1.0")), code=1)
    assert "/srv/bypassd/install.sh --uninstall" in said
    assert not tarball_host.has("usr/lib/bypassd")
    assert tarball_host.calls() == []


def test_a_purge_keeps_the_store_of_the_tarball(debian: Host) -> None:
    dpkg(debian, "-r", "bypassd")
    (debian.root / "etc/systemd/system/bypassd.service").write_text("ExecStart=/srv/bypassd/bin/bypassd run\n")
    (debian.root / "srv/bypassd").mkdir(parents=True)
    (debian.root / "srv/bypassd/install.sh").touch()
    dpkg(debian, "-P", "bypassd")
    assert debian.has(STORE)


def test_the_tarball_refuses_a_host_with_a_package(debian: Host, tmp_path: Path) -> None:
    with tarfile.open(TARBALL) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(debian.root / "unpacked")
    (top,) = (debian.root / "unpacked").iterdir()
    said = debian.run(f"/unpacked/{top.name}/install.sh", code=1)
    assert "apt-get remove bypassd" in said
    assert not debian.has("opt/bypassd")


def rpm(host: Host, *arguments: str | Path, code: int = 0, **environ: str) -> str:
    return host.run("rpm", "--nodeps", *arguments, code=code, **environ)


@pytest.fixture
def centos(host: Host, make: Maker) -> Host:
    """A host with the RPM package, whose service was started by hand and has a store."""
    needed("rpmbuild")
    rpm(host, "-i", host.take(make("rpm", "1.0")))
    assert host.calls() == ["systemctl preset bypassd.service"], "neither enabled nor started by itself"
    host.set("active")
    (host.root / STORE).parent.mkdir(parents=True, exist_ok=True)
    (host.root / STORE).touch()
    return host


def test_rpm_upgrade_restarts_what_runs_and_keeps_the_configuration(centos: Host, make: Maker) -> None:
    (centos.root / CONFIG).write_text("mode: enforce\n")
    rpm(centos, "-U", centos.take(make("rpm", "2.0")))
    assert centos.calls() == ["systemctl restart bypassd.service"]
    assert (centos.root / CONFIG).read_text() == "mode: enforce\n"
    centos.set("active", None)
    rpm(centos, "-U", "--oldpackage", "/bypassd-1.0-1.x86_64.rpm")
    assert centos.calls() == []
    assert centos.run("rpm", "-q", "bypassd") == "bypassd-1.0-1.x86_64\n"


def test_rpm_upgrade_says_when_the_new_version_does_not_start(centos: Host, make: Maker) -> None:
    centos.set("broken")
    rpm_file = centos.take(make("rpm", "2.0"))
    assert "journalctl -u bypassd" in centos.run("sh", "-c", f"rpm --nodeps -U {rpm_file} || true")


def test_rpm_erasure_stops_restores_and_keeps_the_store(centos: Host) -> None:
    (centos.root / "var/cache/bypassd").mkdir(parents=True)
    rpm(centos, "-e", "bypassd")
    assert centos.calls() == [
        "systemctl stop bypassd.service",
        "bypassctl config show store.path",
        "bypassctl restore",
        "systemctl --no-reload disable bypassd.service",
    ]
    assert centos.has(STORE)
    shutil.rmtree(centos.root / "var/lib/bypassd")
    assert centos.remains() == []


def test_rpm_erases_nothing_when_a_value_is_not_restored_unless_forced(centos: Host) -> None:
    centos.set("restore", "1")
    said = rpm(centos, "-e", "bypassd", code=1)
    assert said.count("BYPASSD_FORCE_REMOVE=1") == 1
    assert centos.run("rpm", "-q", "bypassd") == "bypassd-1.0-1.x86_64\n"
    assert centos.has("usr/lib/bypassd/bin/bypassctl")
    rpm(centos, "-e", "bypassd", BYPASSD_FORCE_REMOVE="1")
    assert centos.has(UNRESTORED)
    assert not centos.has("usr/lib/bypassd")


@pytest.mark.parametrize("kind", ["deb", "rpm"])
def test_the_built_package_installs_runs_and_goes(kind: str, host: Host) -> None:
    package = host.take(made(TARBALL, kind))
    if kind == "deb":
        dpkg(host, "-i", package)
    else:
        needed("rpm")
        rpm(host, "-i", package)
    assert host.run("bypassctl", "--version").startswith("bypassctl ")
    assert host.run("bypassd", "check-config").startswith("/etc/bypassd/config.yaml: OK")
    if shutil.which("man"):
        assert host.run("man", "-w", "8", "bypassd") == "/usr/share/man/man8/bypassd.8.gz\n"
    _ = dpkg(host, "-P", "bypassd") if kind == "deb" else rpm(host, "-e", "bypassd")
    assert host.remains() == []
