"""Read, merge and link YAML configurations, and instantiate objects from them."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import inspect
import json
import re
import typing
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from jsonargparse import ArgumentError, ArgumentParser, get_loader

from lit_probattn.base import allowed_code
from lit_probattn.base.config_files import (
    bundle_of,
    entry_of,
    file_named,
    files_in,
    find,
    is_bundle,
    load_yaml,
    merge,
    names_in,
)
from lit_probattn.base.errors import ConfigError, nearest, prefixed

if TYPE_CHECKING:  # files are read without PyTorch
    from lit_probattn.attention import Attention, AttentionFactory

CONFIG = "config.yaml"  # the configuration of a run, in its folder
KEY = re.compile(r'Parser key "([^"]+)"')  # the key in an error of jsonargparse


# ---- reading -----------------------------------------------------------------------------------


_MOST_VALUES = 100_000
_MOST_BYTES = 2**20  # of which PyYAML's loader in Python takes about ten seconds


def _content_error(problem: str, mark: yaml.Mark | None = None) -> ConfigError:
    """Return an error for valid YAML that is not a configuration; the caller prepends the file."""
    return ConfigError(f": {problem}" if mark is None else f":{mark.line + 1}: {problem}")


class _Checks:
    """Reject YAML that PyYAML accepts: duplicate keys, and aliases that expand without bound."""

    def get_single_node(self) -> Any:
        """Return the root node, checked before construction."""
        node = super().get_single_node()  # type: ignore[misc]
        if _count_values(node, {}) > _MOST_VALUES:
            raise _content_error(f"more than {_MOST_VALUES} values after expanding aliases")
        if isinstance(node, yaml.MappingNode):
            for part in (node, *(value for _, value in node.value)):
                _check_words(part)
        return node


def _count_values(node: Any, known: dict[int, int]) -> int:
    """Count the values below a node, expanding aliases; reject duplicate keys."""
    if id(node) in known:
        if not known[id(node)]:
            raise _content_error("recursive alias", node.start_mark)
        return known[id(node)]
    known[id(node)] = 0
    parts = [] if node is None or isinstance(node, yaml.ScalarNode) else node.value
    if isinstance(node, yaml.MappingNode):
        names = set()
        for key in (key for key, _ in parts if isinstance(key, yaml.ScalarNode)):
            if (key.tag, key.value) in names:
                problem = f"duplicate key {key.value!r}: keep one"
                raise _content_error(problem, key.start_mark)
            names.add((key.tag, key.value))
        parts = [item for pair in parts for item in pair]
    known[id(node)] = 1 + sum(_count_values(part, known) for part in parts)
    return known[id(node)]


def _check_words(node: Any) -> None:
    """Reject keys that YAML parses as numbers, dates or booleans."""
    for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
        if key.tag.rpartition(":")[2] not in ("str", "merge"):
            given = getattr(key, "value", key.tag)
            raise _content_error(f"keys must be strings, received {given}", key.start_mark)


@functools.lru_cache(maxsize=256)
def _parsed(text: str) -> Any:
    """Parse YAML, cached for runs that share files; callers must not modify the result."""
    return load_yaml(text, _Checks)


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Return the mapping in a YAML file in canonical form (see `find` and `canonical`).

    Raises:
            ConfigError: the file is missing, is not text or valid YAML, does not hold a mapping, or
            uses a removed option.
    """
    place = find(path)
    bundle = bundle_of(place)
    if bundle is not None:
        content: Any = entry_of(bundle, _read_mapping(bundle, bundle), place)
    elif is_bundle(place) and place.is_file():
        held = next(iter(names_in(place)), "NAME")
        raise ConfigError(
            f"{path} holds several configurations: name one, such as {place.parent / held}.yaml"
        )
    else:
        content = _read_mapping(place, path)
    with prefixed(path, ConfigError):
        return dict(canonical(content))


def _read_mapping(place: Path, path: str | Path) -> dict[str, Any]:
    """Return the content of a YAML file, whose name in error messages is `path`."""
    if place.exists() and not place.is_file():
        kind = "a folder" if place.is_dir() else "not a regular file"
        raise ConfigError(f"{path} is {kind}; expected a YAML file")
    if place.is_symlink() and not place.exists():
        raise ConfigError(f"{path} is a broken symbolic link")
    if not place.is_file():
        folder = Path(path).parent
        names = [str(folder / name) for name in files_in(folder)]
        hint = nearest(str(path), names, lists=folder != Path())
        raise ConfigError(f"configuration file not found: {path}{hint}")
    try:
        size = place.stat().st_size
        if size > _MOST_BYTES:
            raise ConfigError(f"{path} has {size:,} bytes, expected at most {_MOST_BYTES:,}")
        text = place.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not a text file: {error}") from error
    try:
        content = _parsed(text)
    except RecursionError as error:
        raise ConfigError(f"{path}: too deeply nested") from error
    except ConfigError as error:
        raise ConfigError(f"{path}{error}") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark is not None else str(path)
        problem = getattr(error, "problem", None) or getattr(error, "reason", "cannot be read")
        raise ConfigError(f"{where}: not valid YAML: {problem}") from error
    if not isinstance(content, dict):
        kind = type(content).__name__
        raise ConfigError(f"{path}: expected a mapping, received {kind}")
    for key, count in Counter(key for key, _ in settings_of(content)).items():
        if count > 1:
            raise ConfigError(f"{path}: {key} is set twice, nested and dotted: keep one")
    return content


def read_text(text: str) -> dict[str, Any]:
    """Return a configuration stored by a run, in canonical form.

    Raises:
        ConfigError: the text is not YAML, or the configuration is of an unsupported version.
    """
    place = "cannot read the configuration stored by the run"
    with prefixed(place, yaml.YAMLError, TypeError, ValueError):
        return dict(canonical(_parsed(text)))


def flatten(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the leaves of a configuration by dotted key; an empty mapping is a leaf."""
    return dict(settings_of(content))


def different_keys(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the keys whose values differ, such as those of two flattened configurations."""
    return sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))


def settings_of(content: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each leaf of a configuration as a dotted key and its value."""
    for key, value in content.items():
        if isinstance(value, Mapping) and value:
            yield from settings_of(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def own_config(checkpoint: Path) -> Path:
    """Return the path of a checkpoint's configuration, assuming that it is in a run folder."""
    return checkpoint.resolve().parent.parent / CONFIG


def read_config(
    checkpoint: Path,
    files: Sequence[Path] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the configuration of a run: `files` merged, or `config.yaml` of the run folder.

    Args:
        checkpoint: of the run.
        files: instead of `config.yaml`.
        settings: by dotted key, instead of those of the files.

    Raises:
        ConfigError: the configuration is missing, or has no model or data.
    """
    own = own_config(checkpoint)
    if not files and not own.is_file():
        raise ConfigError(f"configuration not found: {own}; pass --config runs/NAME/0/config.yaml")
    found = files or [own]
    config = compose(found, settings or {})
    for part in ("model", "data"):
        if "class_path" not in (config.get(part) or {}):
            names = ", ".join(Path(path).name for path in found)
            raise ConfigError(
                f"{names}: {part}.class_path is missing; pass a task file and an attention file"
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


def reject_two_tasks(contents: Mapping[str, Mapping[str, Any]]) -> None:
    """Reject two task files: the second would inherit keys of the first.

    Raises:
        ConfigError: more than one file sets both a model and data; the message names two.
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
            f"two task files, {tasks[0]} and {tasks[1]}: each sets a model and data; keep one, "
            "and set differences in a file without class_path or by flags"
        )


# ---- merging -----------------------------------------------------------------------------------


# Keys of an entry that names a class, and the entries that contain classes.
_OF_A_CLASS = ("class_path", "init_args", "dict_kwargs")
_CLASSES = (["model"], ["data"], ["model", "init_args", "attention"])


def full_key(key: str) -> str:
    """Return a key of a configuration with the levels `init_args` that it omits.

    Args:
        key: for example `model.attention.backend`, optionally after `TASK:`.

    Returns:
        For example `model.init_args.attention.init_args.backend`.
    """
    task, colon, name = key.rpartition(":")
    parts = name.split(".")
    for place in _CLASSES:
        depth = len(place)
        if parts[:depth] == place and len(parts) > depth and parts[depth] not in _OF_A_CLASS:
            parts.insert(depth, "init_args")
    return task + colon + ".".join(parts)


def parse_settings(texts: Sequence[str], flag: str = "--set") -> dict[str, Any]:
    """Parse `key=value` texts; values are those that `fit` reads from the same text.

    Keys are completed as on the command line of `fit`: `data.path` is `data.init_args.path`.

    Args:
        texts: the texts.
        flag: the flag that sets them, for the message.

    Raises:
        ConfigError: a text has no key or no equals sign.
    """
    found: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise ConfigError(f"{flag}: expected KEY=VALUE, received {text!r}")
        found[full_key(key)] = _value_of(value)
    return found


def _value_of(text: str) -> Any:
    """Return a JSON value, or a boolean, float, list or mapping of YAML; otherwise the text.

    Integers that only YAML has, such as 1:30 and 010, stay texts: options of strings accept them.
    """
    try:
        return json.loads(text)
    except ValueError:
        pass
    try:
        value = get_loader("yaml")(text)
    except yaml.YAMLError:
        return text
    return value if isinstance(value, bool | float | list | dict) else text


def without_replaced(contents: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return configurations without attention that a later one replaces as a whole.

    A later class replaces another class, and whatever a task file or the configuration of a run
    sets. Arguments of one class in several attention files are merged, as in all other parts. If
    all were merged, Gaussian scores of an MGK run would remain in softmax attention.

    Args:
        contents: configurations in order, the last one with the highest precedence.
    """
    result: list[dict[str, Any]] = []
    later: dict[str, Any] = {}
    gone: set[str] = set()  # what comes before a replaced entry is replaced, too
    for content in reversed(contents):
        model: Any = content.get("model")
        arguments: Any = model.get("init_args") if isinstance(model, Mapping) else None
        own = {k: v for k, v in (arguments or {}).items() if _is_whole_attention(k, v)}
        replaced = gone & own.keys() | {
            key
            for key, entry in own.items()
            if key in later and ("class_path" in model or _kind(entry) != _kind(later[key]))
        }
        gone |= replaced
        if replaced:
            kept = {k: v for k, v in arguments.items() if k not in replaced}
            content = {**content, "model": {**model, "init_args": kept}}
        result.insert(0, content)
        later = {**own, **later}
    return result


def _is_whole_attention(key: str, entry: Any) -> bool:
    is_entry = isinstance(entry, Mapping) and ("class_path" in entry or "default" in entry)
    return key.endswith("attention") and (is_entry or isinstance(entry, str))


def _kind(entry: str | Mapping[str, Any]) -> str | None:
    """Return the public path of an entry's class; None for attention per layer."""
    path = entry if isinstance(entry, str) else entry.get("class_path")
    return _public_name(path) if isinstance(path, str) else None


def compose(files: Sequence[str | Path], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Merge configuration files and dotted settings as the command line does.

    Raises:
        ConfigError: a file cannot be read, or two are task files.
    """
    contents = {str(path): read_yaml(path) for path in files}
    reject_two_tasks(contents)
    merged = merge(*without_replaced([contents[str(path)] for path in files]))
    for key, value in settings.items():
        *parents, last = key.split(".")
        place = merged
        for part in parents:
            place = place.setdefault(part, {})
            if not isinstance(place, dict):
                raise ConfigError(f"{key}: {part} is {place!r}, which has no keys")
        place[last] = value
    return merged


# ---- names of classes --------------------------------------------------------------------------

# Packages that re-export their public classes.
_EXPORTING = ("lit_probattn.attention", "lit_probattn.tasks")
_PUBLIC = re.compile(r"(lit_probattn\.(?:attention|tasks)|datamodules)\.[\w.]+\.(\w+)")


def canonical(content: Any) -> Any:
    """Return a copy of a configuration in canonical form.

    Classes have their public paths, and attention per layer is expanded.

    Raises:
        ConfigError: attention per layer that cannot be expanded.
    """
    if isinstance(content, list | tuple):
        return [canonical(item) for item in content]
    if not isinstance(content, Mapping):
        return copy.deepcopy(content)
    result = {key: canonical(item) for key, item in content.items()}
    for key in result:
        if str(key).endswith("attention"):
            result[key] = _written_out(key, result[key])
    if isinstance(result.get("class_path"), str):
        result["class_path"] = _public_name(result["class_path"])
    return result


def _written_out(key: str, entry: Any) -> Any:
    """Return an attention entry with attention per layer expanded."""
    if not isinstance(entry, Mapping) or "default" not in entry:
        return entry
    from lit_probattn.models.per_layer import in_full

    with prefixed(key, ValueError):
        return in_full(entry)


def public_path(cls: type) -> str:
    """Return the path of a class in configurations."""
    return _public_name(f"{cls.__module__}.{cls.__qualname__}")


def load_classes(words: Collection[str]) -> None:
    """Import the public classes that words name without a module: parsers know only loaded ones.

    A help request, which lists all classes of a kind, imports all of them.
    """
    every = not {"--help", "-h"}.isdisjoint(words)
    named = {word.rpartition("=")[2] for word in words}
    for package in map(importlib.import_module, _EXPORTING):
        for name in package.__all__:
            if every or name in named:
                getattr(package, name)


def _public_name(class_path: str) -> str:
    for package in _EXPORTING:
        if class_path in importlib.import_module(package).__all__:
            return f"{package}.{class_path}"
    found = _PUBLIC.fullmatch(class_path)
    if found and found[2] in importlib.import_module(found[1]).__all__:
        return f"{found[1]}.{found[2]}"
    return class_path


# ---- classes and sizes -------------------------------------------------------------------------

# Sizes of the model that the data determine.
SIZES_OF_DATA = (
    *("vocab_size", "source_vocab_size", "num_features", "num_classes", "max_seq_len"),
    "mask_token",
    *("obs_dim", "act_dim", "max_timestep", "context_length"),
)
# Those that only parallel corpora, or only trajectories, define.
SIZES_OF_SOME_DATA = {"source_vocab_size", *SIZES_OF_DATA[-5:]}


@contextlib.contextmanager
def only_allowed_code() -> Iterator[None]:
    """Restrict imports to code that a configuration may name.

    Raises:
        ConfigError: other code would be imported.
    """
    try:
        with allowed_code.guarded():
            yield
    except allowed_code.RefusedCodeError as error:
        raise ConfigError(str(error)) from None


def class_of(path: str) -> Any:
    """Import a class by its full name.

    Raises:
        ConfigError: the class does not exist, or its code is not allowed (`allowed_code`).
    """
    module, _, name = path.rpartition(".")
    try:
        with only_allowed_code():
            return getattr(importlib.import_module(module), name)
    except ConfigError:  # code that is not allowed, or that fails to import
        raise
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"unknown class {path!r}: {error}") from error
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{path}: {allowed_code.import_failure(error)}") from error


def constructors(cls: type) -> Iterator[Callable[..., None]]:
    """Yield a class's constructor, then those of base classes that receive its `**kwargs`."""
    for base in cls.__mro__:
        if "__init__" not in vars(base):
            continue
        constructor = vars(base)["__init__"]
        yield constructor
        own = inspect.signature(constructor).parameters.values()
        if all(parameter.kind != inspect.Parameter.VAR_KEYWORD for parameter in own):
            break  # no further arguments are forwarded


def parameters_of(cls: type) -> dict[str, inspect.Parameter]:
    """Return the constructor's parameters, including those it forwards to base classes."""
    found: dict[str, inspect.Parameter] = {}
    for constructor in constructors(cls):
        found = {**inspect.signature(constructor).parameters, **found}
    rest = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {name: parameter for name, parameter in found.items() if parameter.kind not in rest}


def default_argument(config: Mapping[str, Any], key: str) -> Any:
    """Return the default of a class's argument by its configuration key, or None if it has none.

    Args:
        config: a configuration that includes the class, such as `model.class_path`.
        key: dotted key, such as `model.init_args.dropout`.
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
    """Return whether the constructor accepts arbitrary keyword arguments."""
    from lit_probattn.attention import Attention

    if issubclass(cls, Attention):
        return False  # its constructor rejects unknown arguments by name
    *_, last = constructors(cls)
    kinds = {parameter.kind for parameter in inspect.signature(last).parameters.values()}
    return inspect.Parameter.VAR_KEYWORD in kinds


def types_of(cls: type) -> dict[str, Any]:
    """Return the resolvable type hints of the parameters of `parameters_of`."""
    found: dict[str, Any] = {}
    for constructor in constructors(cls):
        with contextlib.suppress(NameError, TypeError):
            found = {**typing.get_type_hints(constructor, include_extras=True), **found}
    return found


def link_sizes(model: dict[str, Any], *sources: Any) -> None:
    """Set the sizes that a model's constructor accepts and its configuration does not set.

    Args:
        model: class path and arguments; sizes are added to the arguments in place.
        sources: objects or mappings with sizes; the first that has a size wins.
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
        ConfigError: the class cannot be built.
    """
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(base, "it", fail_untyped=False)  # as on the command line
    try:
        return _instantiate(parser, {"it": config}).it
    except ConfigError:
        raise
    except Exception as error:
        name = config.get("class_path", f"a {base.__name__} without class_path")
        raise ConfigError(f"{name}: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    """Return the root cause of a parser error in one line, without the values it repeats."""
    keys = KEY.findall(str(error))
    while error.__cause__ is not None or error.__context__ is not None:
        error = error.__cause__ or error.__context__ or error
        keys += KEY.findall(str(error))
    text = str(error.args[0] if isinstance(error, KeyError) and error.args else error)
    place = f"{keys[-1]}: " if keys and keys[-1] not in ("it", "attention") else ""
    return place + (" ".join(text.partition("Given value")[0].split()) or repr(error))


def attention_factory(class_path: str, init_args: Mapping[str, Any]) -> AttentionFactory:
    """Return the factory that the command line would create from a configuration.

    Raises:
        ConfigError: unknown class or argument, or a value of the wrong type.
    """
    from lit_probattn.attention import AttentionFactory

    def declare(attention: Any) -> None:
        """Declare the attention argument for the parser; never called."""

    declare.__annotations__["attention"] = AttentionFactory
    parser = ArgumentParser(exit_on_error=False)
    parser.add_function_arguments(declare, fail_untyped=False)  # as on the command line
    entry = {"class_path": class_path, "init_args": dict(init_args)}
    try:
        factory: AttentionFactory = _instantiate(parser, {"attention": entry}).attention
    except ConfigError:
        raise
    except (ArgumentError, ValueError, ImportError) as error:
        raise ConfigError(f"attention {class_path}: {_reason(error)}") from error
    return factory


def build_attention(
    class_path: str, init_args: Mapping[str, Any], embed_dim: int, head_dim: int | None
) -> Attention:
    """Return one attention layer.

    Raises:
        ConfigError: see `attention_factory`, or the constructor rejects the sizes.
    """
    factory = attention_factory(class_path, init_args)
    with prefixed(f"attention {class_path}", TypeError, ValueError):
        return factory(embed_dim, head_dim=head_dim)


def create(name: str, embed_dim: int, num_heads: int | None = None, **options: Any) -> Attention:
    """Return an attention layer by the name of its configuration.

        layer = lit_probattn.create("smgk", embed_dim=256, num_heads=4, dropout=0.0)

    Args:
        name: one of `lit_probattn.list_attention()`, or the path of an attention file.
        embed_dim: C, input and output width.
        num_heads: H. None uses the configuration's.
        options: other arguments of the layer, which override the configuration; `head_dim`
            defaults to C / H, as in `torch.nn.MultiheadAttention`. Provided configurations set the
            attention dropout of the papers' recipes, mostly 0.1.

    Raises:
        ConfigError: unknown name or option, or a value that the layer rejects.
    """
    if not isinstance(name, str | Path):
        raise ConfigError(f"name must be an attention name or a path, received {name!r}")
    for word, value in (("embed_dim", embed_dim), ("num_heads", num_heads)):
        _check_whole(word, value, optional=word == "num_heads")
    _check_whole("head_dim", options.get("head_dim"), optional=True)
    entry = attention_entry(file_named("attention", str(name)))
    known = parameters_of(class_of(entry["class_path"])).keys() - {"self"}
    for option in options.keys() - known:
        raise ConfigError(f"attention {name} has no option {option!r}{nearest(option, known)}")
    if num_heads is not None:
        options["num_heads"] = num_heads
    arguments = {**entry["init_args"], **options}
    head_dim = arguments.pop("head_dim", None)
    return build_attention(entry["class_path"], arguments, embed_dim, head_dim)


def _check_whole(name: str, value: Any, *, optional: bool) -> None:
    if not (optional and value is None) and (
        isinstance(value, bool) or not isinstance(value, Integral)
    ):
        raise ConfigError(f"{name} must be an integer, received {value!r}")


def _instantiate(parser: ArgumentParser, content: dict[str, Any]) -> Any:
    # Renamed in jsonargparse 4.49.
    make = getattr(parser, "instantiate", None) or parser.instantiate_classes
    with only_allowed_code():
        parsed = parser.parse_object(content)
    return make(parsed)
