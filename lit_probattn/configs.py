"""YAML to objects: files are read, merged, linked to sizes of the data, and instantiated."""

from __future__ import annotations

import copy
import difflib
import importlib
import inspect
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentError, ArgumentParser

from lit_probattn.attention import Attention, AttentionFactory


class ConfigError(ValueError):
    """A config file that cannot be used; the message is one readable line."""


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Return the mapping in a YAML file.

    Raises:
        ConfigError: no such file, no YAML, or no mapping at the top.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read config {path}: {error.strerror}") from error
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold a mapping, received {type(content).__name__}")
    return content


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
    return {
        "class_path": content["class_path"],
        "init_args": dict(content.get("init_args") or {}),
    }


def attention_factory(class_path: str, init_args: Mapping[str, Any]) -> AttentionFactory:
    """Return the factory that the command line would make from a config.

    Raises:
        ConfigError: unknown class or argument, or a value of the wrong type.
    """
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--attention", type=AttentionFactory)
    entry = {"class_path": class_path, "init_args": dict(init_args)}
    try:
        parsed = parser.parse_object({"attention": entry})
        instantiate = getattr(parser, "instantiate", None) or parser.instantiate_classes
        factory: AttentionFactory = instantiate(parsed).attention
    except (ArgumentError, ValueError, ImportError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise ConfigError(f"attention {class_path}: {' '.join(lines)[:600]}") from error
    return factory


def build_attention(
    class_path: str, init_args: Mapping[str, Any], embed_dim: int, head_dim: int
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


# Sizes that the command line links from the data to the model.
LINKED = ("vocab_size", "num_features", "num_classes", "max_seq_len")


def linked_sizes(class_path: str, names: tuple[str, ...]) -> list[str]:
    """Return those names that the constructor of a class has among its own arguments."""
    module, _, name = class_path.rpartition(".")
    try:
        cls = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"model: unknown class {class_path!r}: {error}") from error
    return [name for name in names if name in inspect.signature(cls).parameters]


def read_config(checkpoint: Path, files: list[Path] | None) -> dict[str, Any]:
    """Return the configuration of a run: `files` merged, or config.yaml of the run folder.

    Raises:
        ConfigError: there is none, or it has no model or data.
    """
    found = files or [checkpoint.resolve().parent.parent / "config.yaml"]
    config: dict[str, Any] = {}
    for path in found:
        if not path.is_file():
            raise ConfigError(
                f"no configuration {path}: give the run's, --config runs/NAME/0/config.yaml"
            )
        try:
            content = yaml.safe_load(path.read_text())
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
        config = _merged(config, content if isinstance(content, dict) else {})
    for part in ("model", "data"):
        if "class_path" not in (config.get(part) or {}):
            names = ", ".join(path.name for path in found)
            raise ConfigError(
                f"{names}: no {part}.class_path; give a task file and an attention file"
            )
    return config


def _merged(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    result = copy.deepcopy(first)
    for key, value in second.items():
        both = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = _merged(result[key], value) if both else copy.deepcopy(value)
    return result


def instantiate(base: type, config: dict[str, Any]) -> Any:
    """Build a class from `class_path` and `init_args`.

    Raises:
        ConfigError: it cannot be built.
    """
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(base, "it")
    try:
        parsed = parser.parse_object({"it": config})
        # Renamed in jsonargparse 4.49; older releases have the old name only.
        make = getattr(parser, "instantiate", None) or parser.instantiate_classes
        return make(parsed).it
    except Exception as error:
        lines = [line.strip(" -") for line in str(error).splitlines() if line.strip()]
        last = lines[-1] if lines else repr(error)
        raise ConfigError(f"{config['class_path']}: {last}") from error


def nearest(word: str, candidates: Iterable[str]) -> str:
    """Text that names the most similar candidate, or lists all of them if they are few."""
    names = sorted(set(candidates))
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    close = close or [name for name in names if name.startswith(word)]
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; valid: {', '.join(names)}" if 0 < len(names) <= 40 else ""


def compose(files: Sequence[str], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Merge configuration files and dotted settings, as the command line does.

    Raises:
        ConfigError: a file cannot be read.
    """
    merged: dict[str, Any] = {}
    for name in files:
        _merge(merged, read_yaml(name))
    for key, value in settings.items():
        *parents, last = key.split(".")
        place = merged
        for part in parents:
            place = place.setdefault(part, {})
        place[last] = value
    return merged


def _merge(base: dict[str, Any], more: Mapping[str, Any]) -> None:
    for key, value in more.items():
        if isinstance(value, Mapping) and isinstance(base.get(key), dict):
            _merge(base[key], value)
        else:
            base[key] = dict(value) if isinstance(value, Mapping) else value


def class_of(path: str) -> Any:
    """Import a class by its full name."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)
