"""Loads and reloads the configuration files: a whole new value, or every problem of every file and nothing changed."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from cgroupfs.bounded import read_file
from cgroupfs.errors import errno_name
from reconciler.config.model import AgentMode, Config, Protection
from reconciler.settings.binder import BoundConfig, ConfigError, Text, TextLayers
from reconciler.settings.nodes import ConfigProblem, Node, SourceLocation
from reconciler.settings.schema import Schema, section_of, settings
from reconciler.settings.yaml import MAX_BYTES

if TYPE_CHECKING:
    from reconciler.config.window_time import WindowTable

_LARGEST: Final = 4 * MAX_BYTES
"""Bytes; a file with more than `MAX_BYTES` characters is reported with its place."""
DEFAULT_PATH: Final = "/etc/bypassd/config.yaml"


class Loaded(Struct, frozen=True, kw_only=True):
    """A configuration in use."""

    config: Config = Config()
    path: str = DEFAULT_PATH
    files: tuple[str, ...] = ()  # those that were read, in order
    origins: Mapping[str, SourceLocation] = {}  # the place of each given setting
    preset: frozenset[str] = frozenset()  # settings that are as protect has them, as no file has them
    # Of the control plane's settings of this node (`reconciler.config.node_layer`), each with its origin.
    node: Mapping[str, str] = {}
    # Keys of earlier versions in the files, which are not used, each with what applies.
    removed: tuple[ConfigProblem, ...] = ()
    texts: tuple[Text, ...] = ()  # what was read
    window: str | None = None  # the name of the window that is in force in the configuration


def load(
    path: str = DEFAULT_PATH, *, required: bool = False, top: Schema | None = None, edited: Text | None = None
) -> Loaded:
    """Read ``path`` and ``conf.d/*.yaml`` next to it, in name order; later files win, setting by setting.

    A missing file counts as no configuration at all, so the defaults apply, unless it is ``required``.
    ``top``: the schema, where the caller uses it, too: making it takes 5 ms. ``edited``: a text in place of the file of
    that name, also where it does not exist yet. Errors: `ConfigError` with every problem of every file.
    """
    problems: list[ConfigProblem] = []
    texts = list(_texts(path, required=required and edited is None, problems=problems))
    if edited is not None:
        kept = [edited if text.name == edited.name else text for text in texts]
        texts = kept if edited in kept else [edited, *kept]
    removed: list[ConfigProblem] = []
    layers = _layers(texts, removed, top)
    bound = layers.bind(_preset)
    # Before the first error is raised: each report has every problem.
    _check_windows(layers, bound)
    if bound is None or problems or layers.problems():
        raise ConfigError((*problems, *layers.problems()))
    files = tuple(text.name for text in texts)
    # The other origins are in the text of the preset, which is not a file.
    origins = {name: at for name, at in bound.origins.items() if at.file in files}
    _check_mode(bound.value, origins)
    preset = bound.origins.keys() - origins.keys()
    return Loaded(
        config=_with_places(bound),
        path=path,
        files=files,
        origins=origins,
        preset=frozenset(preset),
        removed=tuple(removed),
        texts=tuple(texts),
    )


def in_window(loaded: Loaded, index: int | None, top: Schema | None = None) -> Loaded:
    """The configuration in one of its windows, made of the same texts; None: in no window.

    Mode, windows, and what only a restart can apply are as in ``loaded``. ``top``: as of `load`. Every window of a
    loaded configuration is valid.
    """
    if index is None:
        return loaded
    from reconciler.config import presets
    from reconciler.config.window_time import moved

    base = loaded.config
    name = base.windows[index].name
    places = moved(index)
    layers = _layers(loaded.texts, [], top)
    bound = layers.bind(_preset, places, without="windows")
    if bound is None:
        raise ConfigError(layers.problems())
    # The level of a window does not change the mode; ``bind`` had no windows; and after a reload the texts may have
    # values that only a restart applies.
    config, _ = _keep_fixed(base, replace(_with_places(bound), mode=base.mode, windows=base.windows))
    origins = {setting: at for setting, at in bound.origins.items() if at.file in loaded.files}
    preset = bound.origins.keys() - origins.keys()
    for path, setting in places.items():
        for own, at in layers.origins(path, setting).items():
            origins[own] = SourceLocation(f"window {name} ({at})")
    written = {setting: at for setting, at in loaded.origins.items() if setting.startswith("windows")}
    # The mode is the one that the level of the files has.
    preset -= {"mode"}
    if "mode" in loaded.preset:
        assert base.protect is not None
        origins["mode"] = SourceLocation(presets.preset_name(base.protect))
    return replace(loaded, config=config, origins={**origins, **written}, preset=frozenset(preset), window=name)


def in_force(loaded: Loaded, at: float, top: Schema | None = None, zone: str | None = None) -> Loaded:
    """The configuration in the window that holds at an instant, in seconds since the epoch.

    ``zone``: of the windows without one; None: the node's. Errors: `ValueError` where it is given and has no data.
    """
    if not loaded.config.windows:
        return loaded
    return in_window(loaded, window_table(loaded.config, zone).decide(at).window, top)


def window_table(config: Config, zone: str | None = None) -> "WindowTable":
    """The windows of a configuration that has been loaded: the data of their zones was there. ``zone``: as above."""
    from reconciler.config.window_time import WindowTable  # only for a configuration that has some

    return WindowTable(config.windows, config.node.root, zone)


def reload(old: Loaded) -> tuple[Loaded, tuple[str, ...]]:
    """Read the same files again: the new configuration, and the changed settings that only a restart can apply.

    Those settings keep their old values in the result, so that the running process and ``config explain`` agree.
    Errors: `ConfigError`; the caller keeps ``old``.
    """
    # A main file that existed and was removed is an error, not a request for the defaults.
    new = load(old.path, required=old.path in old.files)
    config, kept = _keep_fixed(old.config, new.config)
    return replace(new, config=config), kept


def _keep_fixed(old: Config, new: Config) -> tuple[Config, tuple[str, ...]]:
    kept: list[str] = []

    def merged(before: Struct, after: Struct, section: Schema, prefix: str) -> Struct:
        values: dict[str, object] = {}
        for name, field in section.fields.items():
            was, now = getattr(before, field.attribute), getattr(after, field.attribute)
            if field.schema.struct is not None:
                now = merged(was, now, field.schema, f"{prefix}{name}.")
            elif field.restart and was != now:
                kept.append(f"{prefix}{name}")
                now = was
            values[field.attribute] = now
        assert section.struct is not None
        return section.struct(**values)

    config = merged(old, new, section_of(Config), "")
    assert isinstance(config, Config)
    return config, tuple(kept)


def changed(old: Config, new: Config) -> tuple[str, ...]:
    return tuple(
        path
        for path, field in settings(section_of(Config))
        if field.schema.struct is None and value_at(old, path) != value_at(new, path)
    )


def digest(config: Config) -> str:
    """A short text that is the same for equal configurations, the mode aside (``--observe`` wins over the file's)."""
    import hashlib  # OpenSSL, which `bypassctl config` does not need

    content = msgspec.json.encode(replace(config, mode=AgentMode.OBSERVE), enc_hook=str, order="deterministic")
    return hashlib.sha256(content).hexdigest()[:16]


def setting_count() -> int:
    return sum(field.schema.struct is None for _, field in settings(section_of(Config)))


def value_at(config: Config, path: str) -> object:
    """The value of a dotted name.

    Errors: `AttributeError` for an unknown setting, or a name that a map does not have.
    """
    value: object = config
    for name in path.split("."):
        if isinstance(value, Mapping):
            if name not in value:
                raise AttributeError(f"{path!r}: nothing is named {name!r}")
            value = value[name]
        # The structs' own tables: the schema, which has the same names, takes 5 ms to make.
        elif isinstance(value, Struct) and name in value.__struct_encode_fields__:
            value = getattr(value, value.__struct_fields__[value.__struct_encode_fields__.index(name)])
        else:
            raise AttributeError(f"{path!r} is not a setting")
    return value


def _texts(path: str, *, required: bool, problems: list[ConfigProblem]) -> Iterator[Text]:
    directory = os.path.join(os.path.dirname(path), "conf.d")
    try:
        # Dot files and editors' backups do not end in .yaml or start with a dot; nothing else is left out.
        names = sorted(name for name in os.listdir(directory) if name.endswith(".yaml") and name[0] != ".")
    except (FileNotFoundError, NotADirectoryError):
        names = []
    except OSError as exc:
        problems.append(ConfigProblem(SourceLocation(directory), "", f"cannot be listed: {errno_name(exc.errno)}"))
        names = []
    for file in (path, *(os.path.join(directory, name) for name in names)):
        try:
            # A person names it: a pipe of the shell's, or /dev/null for no configuration at all.
            content = read_file(file, _LARGEST, pipes=True)
            yield Text(file, content.decode())
        except FileNotFoundError:
            # One that the directory listed is not optional: its settings were meant.
            if file != path or required:
                problems.append(ConfigProblem(SourceLocation(file), "", "no such file"))
        except PermissionError:
            problems.append(ConfigProblem(SourceLocation(file), "", "permission denied: run with sudo"))
        except OSError as exc:
            problems.append(ConfigProblem(SourceLocation(file), "", f"cannot be read: {errno_name(exc.errno)}"))
        except UnicodeDecodeError as exc:
            line = content.count(b"\n", 0, exc.start) + 1
            column = exc.start - content.rfind(b"\n", 0, exc.start)
            problems.append(ConfigProblem(SourceLocation(file, line, column), "", "not UTF-8 text"))


def _prune_into(found: list[ConfigProblem]) -> Callable[[Node], Node]:
    from reconciler.config.removed import RemovedKeys  # only where there is a file

    return RemovedKeys(found).prune


def _layers(texts: Iterable[Text], removed: list[ConfigProblem], top: Schema | None) -> TextLayers[Config]:
    texts = tuple(texts)
    return TextLayers(Config, texts, prune=_prune_into(removed) if texts else None, section=top)


def _check_windows(layers: TextLayers[Config], bound: BoundConfig[Config] | None) -> None:
    """Each window's whole configuration, also where another window or setting has a mistake; and their names."""
    count = layers.count("windows")
    if not count:
        return
    from reconciler.config.window_time import WindowTable, moved

    names: dict[object, int] = {}
    for index in range(count):
        name, at = layers.value(("windows", index, "name")), layers.place(("windows", index))
        layers.bind(_preset, moved(index), without="windows", note=f" (in window {name or index})")
        first = names.setdefault(name, index)
        if name is not None and first != index and at is not None:
            text = f"expected a name of its own; windows[{first}] is {name}, too"
            layers.refuse(ConfigProblem(at, f"windows[{index}].name", text))
    for index, window in enumerate(bound.value.windows if bound is not None else ()):
        # A zone that is not named is the node's, which is known only with ``node.root``.
        try:
            WindowTable([window], bound.value.node.root if bound is not None else "/")
        except ValueError as exc:
            place = layers.place(("windows", index, "when"))
            assert place is not None
            layers.refuse(ConfigProblem(place, f"windows[{index}].when", str(exc)))


def _preset(top_level: Mapping[str, object]) -> Text | None:
    """The layer below the files that their ``protect`` means."""
    level = top_level.get("protect")
    if level is None:
        return None
    from reconciler.config import presets  # only for a configuration that has one

    return presets.layer(Protection(str(level)))


def _check_mode(config: Config, origins: Mapping[str, SourceLocation]) -> None:
    """A level above observe may be watched first (``mode: observe``); but observe must not write.

    Errors: `ConfigError`.
    """
    if config.protect is Protection.OBSERVE and config.mode is AgentMode.ENFORCE:
        message = (
            f"enforce contradicts protect: observe ({origins['protect']}), which writes nothing; remove one of them"
        )
        raise ConfigError([ConfigProblem(origins["mode"], "mode", message)])


def _with_places(bound: BoundConfig[Config]) -> Config:
    """The overrides with their place in the file: ``explain`` shows it as the source of a pod's class."""
    config = bound.value
    overrides = tuple(
        override if override.origin else replace(override, origin=str(bound.origins[f"classes.overrides[{index}]"]))
        for index, override in enumerate(config.classes.overrides)
    )
    return replace(config, classes=replace(config.classes, overrides=overrides))
