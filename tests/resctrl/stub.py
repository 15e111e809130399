"""A resctrl tree of plain dictionaries for what single functions do; the strict model of the kernel is a fake apart."""

import errno
from collections.abc import Callable

from resctrl.schemata import format_schemata, parse_schemata


class Stub:
    """`GroupFiles`. ``refuse`` maps (what, path) to the errno of its next uses; ``after`` runs after each write."""

    def __init__(self, files: dict[str, str]) -> None:
        self.texts = {f"/r/{path}": text for path, text in files.items()}
        self.dirs = {"/r", "/r/info", "/r/mon_data", "/r/mon_groups"}
        for path in self.texts:
            self.dirs |= {path[:at] for at, letter in enumerate(path) if letter == "/" and at}
        self.refuse: dict[tuple[str, str], int] = {}
        self.writes: list[tuple[str, str]] = []
        self.on_write: Callable[[str, str], None] = lambda path, text: None

    def _may(self, what: str, path: str) -> None:
        if code := self.refuse.get((what, path)):
            raise OSError(code, what, path)

    def read(self, directory: str, file: str) -> str:
        path = f"{directory}/{file}"
        self._may("read", path)
        if path not in self.texts:
            raise FileNotFoundError(errno.ENOENT, "no file", path)
        return self.texts[path]

    def write(self, directory: str, file: str, text: str) -> None:
        path = f"{directory}/{file}"
        if path not in self.texts:
            raise FileNotFoundError(errno.ENOENT, "no file", path)
        self._may("write", path)
        self._may(f"write {text.strip()}", path)
        self.writes.append((path, text))
        if file == "tasks":
            for other, known in self.texts.items():
                if other.endswith("/tasks"):
                    self.texts[other] = "".join(f"{part}\n" for part in known.split() if part != text.strip())
            self.texts[path] += text
        else:
            held = parse_schemata(self.texts[path])
            for name, domains in parse_schemata(text).items():
                held[name] |= domains
            self.texts[path] = format_schemata(held)
        self.on_write(path, text)

    def inode(self, directory: str) -> int:
        if directory not in self.dirs:
            raise FileNotFoundError(errno.ENOENT, "no directory", directory)
        return sum(directory.encode())

    def listdir(self, directory: str) -> list[str]:
        self.inode(directory)
        texts = [path for path in (*self.texts, *self.dirs) if path.rpartition("/")[0] == directory]
        return [path.rpartition("/")[2] for path in texts]

    def groups(self, directory: str, most: int | None = None) -> list[str]:
        return [name for name in self.listdir(directory) if f"{directory}/{name}" in self.dirs][:most]

    def mkdir(self, path: str) -> None:
        self._may("mkdir", path)
        if path in self.dirs:
            raise FileExistsError(errno.EEXIST, "there", path)
        self.dirs |= {path, f"{path}/mon_data", f"{path}/mon_groups"}
        self.texts |= {f"{path}/tasks": "", f"{path}/schemata": self.texts["/r/schemata"]}

    def rmdir(self, path: str) -> None:
        self._may("rmdir", path)
        self.inode(path)
        self.dirs = {text for text in self.dirs if not f"{text}/".startswith(f"{path}/")}
        self.texts = {item: text for item, text in self.texts.items() if not item.startswith(f"{path}/")}


def tree(**more: str) -> Stub:
    return Stub(
        {
            "schemata": "    MB:0=100;1=100\n    L3:0=fff;1=fff\n",
            "tasks": "1\n2\n10\n11\n12\n",
            "info/last_cmd_status": "ok\n",
            **{path.replace("__", "/"): text for path, text in more.items()},
        }
    )
