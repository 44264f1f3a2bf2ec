"""From the attention part of a config file to attention layers."""

from __future__ import annotations

from collections.abc import Mapping
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
    """Return `attention(embed_dim, head_dim)` as the command line would make it from a config.

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
        return factory(embed_dim, head_dim)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"attention {class_path}: {error}") from error
