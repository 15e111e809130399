"""A machine to install packages on: this one's files below an overlay, with a recording systemctl."""

import subprocess
from pathlib import Path

SYSTEMCTL = """\
#!/bin/sh
case "$*" in *--root=*) exec systemctl.real "$@" ;; esac
case "$*" in *is-active* | *is-enabled*) ;; *) echo "systemctl $*" >>/stub/log ;; esac
case "$*" in
*is-active*) [ -e /stub/active ] && echo active || { echo inactive; exit 3; } ;;
*is-enabled*) [ -e /etc/systemd/system/multi-user.target.wants/bypassd.service ] && echo enabled ;;
*restart* | *start*) [ ! -e /stub/broken ] || exit 1; : >/stub/active ;;
*stop*) rm -f /stub/active ;;
esac
"""


def mount(*arguments: str | Path) -> None:
    subprocess.run(["mount", *arguments], check=True)


class Host:
    """What is written stays in memory. ``place`` is an empty directory; `close` ends it. Needs root."""

    def __init__(self, place: Path) -> None:
        self.memory, self.root = place / "memory", place / "root"
        self.mounted: list[Path] = []
        self.memory.mkdir()
        self.root.mkdir()
        self._mount(self.memory, "-t", "tmpfs", "tmpfs")
        for name in ("upper", "work"):
            (self.memory / name).mkdir()
        layers = f"lowerdir=/,upperdir={self.memory}/upper,workdir={self.memory}/work"
        self._mount(self.root, "-t", "overlay", "overlay", "-o", layers)
        self._mount(self.root / "proc", "-t", "proc", "proc")
        self._mount(self.root / "dev", "--rbind", "/dev")
        for name in ("stub", "run/systemd/system", "etc/systemd/system"):
            (self.root / name).mkdir(parents=True, exist_ok=True)
        # Containers' images forbid to start services.
        (self.root / "usr/sbin/policy-rc.d").unlink(missing_ok=True)
        program = self.root / "usr/bin/systemctl"
        # Links of units are made by the real one, which deb-systemd-helper runs with --root.
        if program.exists():
            program.rename(program.with_name("systemctl.real"))
        program.write_text(SYSTEMCTL)
        program.chmod(0o755)

    def _mount(self, target: Path, *arguments: str) -> None:
        mount(*arguments, target)
        self.mounted.append(target)

    def close(self) -> None:
        """Unmount everything."""
        for target in reversed(self.mounted):
            subprocess.run(["umount", "-l", target], check=True)

    def run(self, *command: str | Path, code: int = 0, **environ: str) -> str:
        """Run a program on it, which must end with that code; both of its outputs."""
        done = subprocess.run(
            ["chroot", self.root, *command],
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "DEBIAN_FRONTEND": "noninteractive", **environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            check=False,
        )
        assert done.returncode == code, f"exit {done.returncode}\n{done.stdout}"
        return done.stdout

    def take(self, file: Path) -> Path:
        """Copy a file to its root directory; its path there."""
        (self.root / file.name).write_bytes(file.read_bytes())
        return Path("/", file.name)

    def set(self, name: str, text: str | None = "") -> None:
        """A fact for the stubs: ``active``, ``broken``, ``restore`` (its exit code). None: unset it."""
        path = self.root / "stub" / name
        path.unlink(missing_ok=True) if text is None else path.write_text(text)

    def has(self, path: str) -> bool:
        """Whether there is a file, directory or link."""
        place = self.root / path.lstrip("/")
        return place.is_symlink() or place.exists()

    def calls(self) -> list[str]:
        """What systemctl and bypassctl were called with since the last time, without reloads of systemd."""
        log = self.root / "stub/log"
        lines = log.read_text().splitlines() if log.exists() else []
        log.unlink(missing_ok=True)
        # deb-systemd-invoke has words of its own before the verb.
        known = [line.replace("--quiet ", "").replace("--system ", "") for line in lines]
        return [line for line in known if not line.endswith("daemon-reload")]

    def remains(self) -> list[str]:
        """Every path with its name in it that was written and is still there."""
        upper = self.memory / "upper"
        found = (path.relative_to(upper) for path in upper.rglob("*") if path.exists() and "bypassd" in path.name)
        ignored = ("stub/", "var/log/", "var/lib/dpkg/", "tmp/")
        return sorted(str(path) for path in found if not str(path).startswith(ignored) and path.parent != Path())
