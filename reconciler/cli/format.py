"""Groups and values of the document as text; numbers and times are in `reconciler.runtime.format`."""

from collections.abc import Mapping


def short_path(path: str) -> str:
    """A group's path with the first 12 characters of a container's id."""
    above, _, name = path.rpartition("/")
    return f"{above}/{name[:12]}…" if len(name) == 64 else path


def group_title(path: str, titles: Mapping[str, str]) -> str:
    """A pod's group as ``namespace/name``, a container's with the start of its id, every other as its path.

    ``titles``: pods' titles by the path of their group.
    """
    above, _, name = path.rpartition("/")
    if path in titles:
        return titles[path]
    return f"{titles[above]}/{name[:12]}" if above in titles else short_path(path)


def value_text(value: object) -> str:
    """A value of the document; a dash if it is missing, one line where the file has several."""
    return "-" if value is None or value == "" else str(value).replace("\n", "; ")
