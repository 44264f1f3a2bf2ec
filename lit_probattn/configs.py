"""YAML to objects: read, upgraded, merged, linked to the data, instantiated."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import inspect
import re
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentError, ArgumentParser

from lit_probattn.attention import Attention, AttentionFactory
from lit_probattn.base import allowed_code
from lit_probattn.base.config_files import ConfigError, file_named, files_in, find, nearest
from lit_probattn.models.per_layer import in_full

KEY = re.compile(r'Parser key "([^"]+)"')  # where jsonargparse found something wrong


# ---- reading -----------------------------------------------------------------------------------


_MOST_VALUES = 100_000


class _RefusedYAMLError(yaml.MarkedYAMLError):
    """Valid YAML that is no configuration."""


class _CheckedLoader(yaml.SafeLoader):
    """Refuses what PyYAML takes: a key twice, where the first is lost, and endless aliases."""

    def get_single_node(self) -> Any:
        """Return the whole document, checked before anything is made of it."""
        node = super().get_single_node()
        if _count_values(node, {}) > _MOST_VALUES:
            raise _RefusedYAMLError(
                problem=f"its aliases stand for more than {_MOST_VALUES} values"
            )
        if isinstance(node, yaml.MappingNode):
            for part in (node, *(value for _, value in node.value)):
                _check_words(part)
        return node


def _count_values(node: Any, known: dict[int, int]) -> int:
    """Count the values of a node, again for every alias; refuse a key that stands there twice."""
    if id(node) in known:
        if not known[id(node)]:
            raise _RefusedYAMLError(
                problem="an alias contains itself", problem_mark=node.start_mark
            )
        return known[id(node)]
    known[id(node)] = 0
    parts = [] if node is None or isinstance(node, yaml.ScalarNode) else node.value
    if isinstance(node, yaml.MappingNode):
        names = set()
        for key in (key for key, _ in parts if isinstance(key, yaml.ScalarNode)):
            if (key.tag, key.value) in names:
                problem = f"the key {key.value!r} stands here twice in one mapping; keep one"
                raise _RefusedYAMLError(problem=problem, problem_mark=key.start_mark)
            names.add((key.tag, key.value))
        parts = [item for pair in parts for item in pair]
    known[id(node)] = 1 + sum(_count_values(part, known) for part in parts)
    return known[id(node)]


def _check_words(node: Any) -> None:
    """Refuse keys that are numbers, dates or truth values, which no part of ours has."""
    for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
        if key.tag.rpartition(":")[2] not in ("str", "merge"):
            raise _RefusedYAMLError(
                problem=f"keys must be words, received {getattr(key, 'value', key.tag)}",
                problem_mark=key.start_mark,
            )


@functools.lru_cache(maxsize=256)
def _parsed(text: str) -> Any:
    """Parse YAML; the many cells of a table share a few files. What is returned is not changed."""
    return yaml.load(text, _CheckedLoader)


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Return the mapping in a YAML file, in today's terms (see `find` and `upgrade`).

    Raises:
        ConfigError: no such file, no text, no YAML, no mapping at the top, or what it says can no
            longer be had.
    """
    place = find(path)
    if place.exists() and not place.is_file():
        kind = "a folder" if place.is_dir() else "not a regular file"
        raise ConfigError(f"{path} is {kind}; expected a YAML file")
    if not place.is_file():
        folder = Path(path).parent
        names = [str(folder / name) for name in files_in(folder)]
        raise ConfigError(f"configuration file not found: {path}{nearest(str(path), names)}")
    try:
        text = place.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not a text file: {error}") from error
    try:
        content = _parsed(text)
    except RecursionError as error:
        raise ConfigError(f"{path}: nested too deeply") from error
    except _RefusedYAMLError as error:
        where = "" if error.problem_mark is None else f":{error.problem_mark.line + 1}"
        raise ConfigError(f"{path}{where}: {error.problem}") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark is not None else str(path)
        problem = getattr(error, "problem", None) or getattr(error, "reason", "cannot be read")
        raise ConfigError(f"{where}: not valid YAML: {problem}") from error
    if not isinstance(content, dict):
        kind = type(content).__name__
        raise ConfigError(f"{path} must hold a mapping of keys, received {kind}")
    try:
        return upgrade(content)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def read_config(checkpoint: Path, files: Sequence[Path] | None = None) -> dict[str, Any]:
    """Return the configuration of a run: `files` merged, or config.yaml of the run folder.

    Raises:
        ConfigError: there is none, or it has no model or data.
    """
    own = checkpoint.resolve().parent.parent / "config.yaml"
    if not files and not own.is_file():
        raise ConfigError(
            f"no configuration {own}: give the run's, --config runs/NAME/0/config.yaml"
        )
    found = files or [own]
    config = compose(found, {})
    for part in ("model", "data"):
        if "class_path" not in (config.get(part) or {}):
            names = ", ".join(Path(path).name for path in found)
            raise ConfigError(
                f"{names}: no {part}.class_path; give a task file and an attention file"
            )
    return config


def attention_entry(path: str | Path) -> dict[str, Any]:
    """Return `class_path` and `init_args` of an attention config file.

    Raises:
        ConfigError: the file does not set `model.init_args.attention`.
    """
    content: Any = read_yaml(path)
    for key in ("model", "init_args", "attention"):
        content = content.get(key) if isinstance(content, Mapping) else None
    if not isinstance(content, Mapping) or "class_path" not in content:
        raise ConfigError(f"{path} does not set model.init_args.attention.class_path")
    return {"class_path": content["class_path"], "init_args": dict(content.get("init_args") or {})}


def refuse_two_tasks(contents: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse two files that each choose a model and data: the second would keep keys of the first.

    Raises:
        ConfigError: it names both.
    """

    def chooses(part: Any) -> bool:
        return isinstance(part, str) or (isinstance(part, Mapping) and "class_path" in part)

    tasks = [
        name
        for name, content in contents.items()
        if chooses(content.get("model")) and chooses(content.get("data"))
    ]
    if len(tasks) > 1:
        raise ConfigError(
            f"two task files, {tasks[0]} and {tasks[1]}: each chooses a model and data; keep one, "
            "and set what should differ in a file without class_path or by flags"
        )


# ---- merging -----------------------------------------------------------------------------------


def merge(*contents: Mapping[str, Any]) -> dict[str, Any]:
    """Merge configurations into a new one: later ones win, key by key."""
    merged: dict[str, Any] = {}
    for content in contents:
        for key, value in content.items():
            both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
            merged[key] = merge(merged[key], value) if both else copy.deepcopy(value)
    return merged


def compose(files: Sequence[str | Path], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Merge configuration files and dotted settings, as the command line does.

    Raises:
        ConfigError: a file cannot be read, or two of them are task files.
    """
    contents = {str(path): read_yaml(path) for path in files}
    refuse_two_tasks(contents)
    merged = merge(*(contents[str(path)] for path in files))
    for key, value in settings.items():
        *parents, last = key.split(".")
        place = merged
        for part in parents:
            place = place.setdefault(part, {})
            if not isinstance(place, dict):
                raise ConfigError(f"{key}: {part} is {place!r} here, which has no keys of its own")
        place[last] = value
    return merged


# ---- upgrading ---------------------------------------------------------------------------------

# Full name of a class -> option -> its old default, and the class that still has the option.
Retired = Mapping[str, Mapping[str, tuple[Any, str | None]]]

MOVED_CLASSES = {
    f"lit_probattn.tasks.{module}.ShardedDataParallel": (
        "lit_probattn.training.sharding.ShardedDataParallel"
    )
    for module in ("sharding", "distributed")
}
# Packages that export their classes, whichever module of theirs a class is or was written in.
_PUBLIC = re.compile(r"(lit_probattn\.(?:attention|tasks)|datamodules)\.[\w.]+\.(\w+)")

_RELEASED_LINEAR: Mapping[str, Any] = {
    "denominator": "sum",
    "eps": 0.0,
    "output_scale": "one",
    "padded_len": None,
}
# What only released code does lives in classes of its own.
_RELEASED: Mapping[str, Mapping[str, Any]] = {
    "MGKAttention": {
        "row_eps": 0.0,
        "em_code_parity": "none",
        "shift_first_zero": False,
        "prior_floor": 1e-6,
    },
    "LinearAttention": _RELEASED_LINEAR,
    "MLKAttention": {"mix": "after", "shift_first_zero": False, **_RELEASED_LINEAR},
}
# What no class does any more: an M-step replaces the priors.
_GONE: Mapping[str, Mapping[str, Any]] = {
    "MGKAttention": {"prior_momentum": 0.0},
    "ReleasedMGKAttention": {"prior_momentum": 0.0},
}
RETIRED: Retired = {
    f"lit_probattn.attention.{name}": {
        **{
            option: (default, f"lit_probattn.attention.Released{name}")
            for option, default in _RELEASED.get(name, {}).items()
        },
        **{option: (default, None) for option, default in _GONE.get(name, {}).items()},
    }
    for name in (*_RELEASED, "ReleasedMGKAttention")
}


def upgrade(content: Any, retired: Retired = RETIRED) -> Any:
    """Return a configuration that an earlier version wrote in today's terms; `content` is kept.

    Classes are found under their new paths, and attention by layers is written out. A retired
    option with another value than its old default selects the class that still has it. Where no
    option does, all of them are dropped; the selected class keeps its own, so that an old
    configuration says what a new one resolves to.

    Raises:
        ConfigError: an option has a value that no class takes any more.
    """
    if isinstance(content, list | tuple):
        return [upgrade(item, retired) for item in content]
    if not isinstance(content, Mapping):
        return copy.deepcopy(content)
    result = {key: upgrade(item, retired) for key, item in content.items()}
    for key in result:
        if str(key).endswith("attention"):
            result[key] = _written_out(key, result[key])
    if isinstance(result.get("class_path"), str):
        result["class_path"] = _new_class_path(result["class_path"])
        if isinstance(result.get("init_args"), dict):
            _retire(result, retired.get(result["class_path"], {}))
    return result


def _written_out(key: str, entry: Any) -> Any:
    """Return an attention, written out where it is given by layers."""
    try:
        return in_full(entry)
    except ValueError as error:
        raise ConfigError(f"{key}: {error}") from error


def public_path(cls: type) -> str:
    """Return the full name by which a configuration calls a class."""
    return _new_class_path(f"{cls.__module__}.{cls.__qualname__}")


def _new_class_path(class_path: str) -> str:
    if class_path in MOVED_CLASSES:
        return MOVED_CLASSES[class_path]
    found = _PUBLIC.fullmatch(class_path)
    if found and found[2] in importlib.import_module(found[1]).__all__:
        return f"{found[1]}.{found[2]}"
    return class_path


def _retire(entry: dict[str, Any], options: Mapping[str, tuple[Any, str | None]]) -> None:
    """Take retired options from the arguments of a class, or put the one class that has them."""
    cls, arguments = entry["class_path"], entry["init_args"]
    given = {option: options[option] for option in options if option in arguments}
    classes = set()
    for option, (default, successor) in given.items():
        if arguments[option] == default:
            continue
        if successor is None:
            raise ConfigError(
                f"{cls} no longer has the option {option} ({arguments[option]!r} here) and always "
                f"works as with {default!r}: leave the option out"
            )
        classes.add(successor)
    if len(classes) > 1:
        raise ConfigError(
            f"no class has all options of this {cls}: choose one of {', '.join(sorted(classes))}"
        )
    for option, (_, successor) in given.items():
        if successor not in classes:  # at its default; a class that has it keeps it
            del arguments[option]
    entry["class_path"] = next(iter(classes), cls)


# ---- classes and sizes -------------------------------------------------------------------------

# What the data tell the model.
SIZES_OF_DATA = (
    *("vocab_size", "source_vocab_size", "num_features", "num_classes", "max_seq_len"),
    "mask_token",
    *("obs_dim", "act_dim", "max_timestep", "context_length"),
)
# Those that only pairs of languages, or only trajectories, have.
SIZES_OF_SOME_DATA = {"source_vocab_size", *SIZES_OF_DATA[-5:]}


@contextlib.contextmanager
def only_allowed_code() -> Iterator[None]:
    """Import only code that a configuration may name.

    Raises:
        ConfigError: other code was to be imported; it was not.
    """
    try:
        with allowed_code.guarded():
            yield
    except allowed_code.RefusedCodeError as error:
        raise ConfigError(str(error)) from None


def class_of(path: str) -> Any:
    """Import a class by its full name.

    Raises:
        ConfigError: there is no such class, or its code may not be named (`allowed_code`).
    """
    module, _, name = path.rpartition(".")
    try:
        with only_allowed_code():
            return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"unknown class {path!r}: {error}") from error


def constructors(cls: type) -> Iterator[Callable[..., None]]:
    """Yield a class's constructor, then those of base classes that it hands arguments on to."""
    for base in cls.__mro__:
        if "__init__" not in vars(base):
            continue
        constructor = vars(base)["__init__"]
        yield constructor
        own = inspect.signature(constructor).parameters.values()
        if all(parameter.kind != inspect.Parameter.VAR_KEYWORD for parameter in own):
            break  # nothing is handed on


def parameters_of(cls: type) -> dict[str, inspect.Parameter]:
    """Return the constructor's parameters, those that it hands on to base classes too."""
    found: dict[str, inspect.Parameter] = {}
    for constructor in constructors(cls):
        found = {**inspect.signature(constructor).parameters, **found}
    rest = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {name: parameter for name, parameter in found.items() if parameter.kind not in rest}


def default_argument(config: Mapping[str, Any], key: str) -> Any:
    """Return the default of a class's argument, by its key in a configuration; None without one.

    Args:
        config: a configuration with the class, such as `model.class_path`.
        key: dotted, such as `model.init_args.dropout`.
    """
    parent, _, name = key.rpartition(".init_args.")
    place: Any = config
    for part in parent.split("."):
        place = place.get(part) if isinstance(place, Mapping) else None
    path = place.get("class_path") if isinstance(place, Mapping) else None
    parameter = parameters_of(class_of(path)).get(name) if path else None
    if parameter is None or parameter.default is inspect.Parameter.empty:
        return None
    return parameter.default


def takes_any_name(cls: type) -> bool:
    """Return whether a class takes arguments that no constructor of it names."""
    if issubclass(cls, Attention):
        return False  # its constructor names what it was given too much
    *_, last = constructors(cls)
    kinds = {parameter.kind for parameter in inspect.signature(last).parameters.values()}
    return inspect.Parameter.VAR_KEYWORD in kinds


def types_of(cls: type) -> dict[str, Any]:
    """Return the types of these parameters, where they can be found out."""
    found: dict[str, Any] = {}
    for constructor in constructors(cls):
        with contextlib.suppress(NameError, TypeError):
            found = {**typing.get_type_hints(constructor), **found}
    return found


def link_sizes(model: dict[str, Any], *sources: Any) -> None:
    """Give a model the sizes that its constructor takes and its configuration does not set.

    Args:
        model: class path and arguments; the sizes are added to the arguments.
        sources: objects or mappings that know sizes; the first that knows one is asked.
    """
    arguments = model.setdefault("init_args", {})
    accepted = parameters_of(class_of(model["class_path"]))
    for name in SIZES_OF_DATA:
        if name not in accepted or name in arguments:
            continue
        for source in sources:
            known = source.get(name) if isinstance(source, Mapping) else getattr(source, name, None)
            if known is not None:
                arguments[name] = known
                break


# ---- instantiating -----------------------------------------------------------------------------


def instantiate(base: type, config: Mapping[str, Any]) -> Any:
    """Build a class from `class_path` and `init_args`.

    Raises:
        ConfigError: it cannot be built.
    """
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(base, "it")
    try:
        return _instantiate(parser, {"it": config}).it
    except ConfigError:
        raise
    except Exception as error:
        name = config.get("class_path", f"a {base.__name__} without class_path")
        raise ConfigError(f"{name}: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    """What is behind an error of the parser, in one line, without the values that it repeats."""
    keys = KEY.findall(str(error))
    while error.__cause__ is not None or error.__context__ is not None:
        error = error.__cause__ or error.__context__ or error
        keys += KEY.findall(str(error))
    text = str(error.args[0] if isinstance(error, KeyError) and error.args else error)
    place = f"{keys[-1]}: " if keys and keys[-1] != "it" else ""
    return place + (" ".join(text.partition("Given value")[0].split()) or repr(error))


def attention_factory(class_path: str, init_args: Mapping[str, Any]) -> AttentionFactory:
    """Return the factory that the command line would make from a config.

    Raises:
        ConfigError: unknown class or argument, or a value of the wrong type.
    """
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--attention", type=AttentionFactory)
    entry = {"class_path": class_path, "init_args": dict(init_args)}
    try:
        factory: AttentionFactory = _instantiate(parser, {"attention": entry}).attention
    except ConfigError:
        raise
    except (ArgumentError, ValueError, ImportError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise ConfigError(f"attention {class_path}: {' '.join(lines)[:600]}") from error
    return factory


def build_attention(
    class_path: str, init_args: Mapping[str, Any], embed_dim: int, head_dim: int | None
) -> Attention:
    """Return one attention layer.

    Raises:
        ConfigError: see `attention_factory`; or the constructor refuses the sizes.
    """
    factory = attention_factory(class_path, init_args)
    try:
        return factory(embed_dim, head_dim=head_dim)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"attention {class_path}: {error}") from error


def create(name: str, embed_dim: int, num_heads: int | None = None, **options: Any) -> Attention:
    """Return an attention layer by the name of its configuration.

        layer = lit_probattn.create("smgk", embed_dim=256, num_heads=4, dropout=0.0)

    Args:
        name: one of `lit_probattn.list_attention()`, or the path of a file of configs/attention.
        embed_dim: C, input and output width.
        num_heads: H. None means the configuration's.
        options: other arguments of the layer, in place of the configuration's; `head_dim` is C / H
            if it is not given, as in `torch.nn.MultiheadAttention`. Shipped configurations set the
            attention dropout of the papers' recipes, mostly 0.1.

    Raises:
        ConfigError: unknown name or option, with the nearest, or a value that the layer refuses.
    """
    entry = attention_entry(file_named("attention", name))
    known = parameters_of(class_of(entry["class_path"])).keys() - {"self"}
    for option in options.keys() - known:
        raise ConfigError(f"attention {name} has no option {option!r}{nearest(option, known)}")
    if num_heads is not None:
        options["num_heads"] = num_heads
    arguments = {**entry["init_args"], **options}
    head_dim = arguments.pop("head_dim", None)
    return build_attention(entry["class_path"], arguments, embed_dim, head_dim)


def _instantiate(parser: ArgumentParser, content: dict[str, Any]) -> Any:
    # Renamed in jsonargparse 4.49; older releases have the old name only.
    make = getattr(parser, "instantiate", None) or parser.instantiate_classes
    with only_allowed_code():
        parsed = parser.parse_object(content)
    return make(parsed)
