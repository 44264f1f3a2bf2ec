"""What a table file says: variants, archives, recipes, published numbers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datamodules.series.archive import ARCHIVES, check_name
from lit_probattn.configs import ConfigError, attention_entry, nearest, read_yaml, run_stem


@dataclass(frozen=True)
class Variant:
    """An attention variant.

    Args:
        name: its name in the table.
        config: file of configs/attention.
        init_args: arguments that differ from the file's.
        published: key of the published column, or None.
    """

    name: str
    config: str
    init_args: dict[str, Any]
    published: str | None

    def entry(self) -> dict[str, Any]:
        """Class path and all arguments."""
        entry = attention_entry(self.config)
        return {**entry, "init_args": {**entry["init_args"], **self.init_args}}


@dataclass(frozen=True)
class Recipe:
    """How one archive is trained.

    Args:
        archive: its name.
        protocol: `mvts` or `flowformer`.
        epochs: passes over the training split.
        batch_size: largest batch; smaller training splits lower it.
        model: arguments of the model.
        sizes: where the sizes come from.
        published: accuracy in percent by column; empty if the table does not have the archive.
    """

    archive: str
    protocol: str
    epochs: int
    batch_size: int
    model: dict[str, Any]
    sizes: str
    published: dict[str, float]


@dataclass(frozen=True)
class Table:
    """A table file.

    Args:
        path: the file.
        task: task file of every run.
        seeds: default seeds.
        variants: by name.
        content: the whole file.
    """

    path: str
    task: str
    seeds: list[int]
    variants: dict[str, Variant]
    content: dict[str, Any]

    @classmethod
    def read(cls, path: str) -> Table:
        """Read a table file.

        Raises:
            ConfigError: it is missing, or lacks a part.
        """
        content = read_yaml(path)
        for key in ("task", "seeds", "variants", "protocols", "archives", "others"):
            if key not in content:
                raise ConfigError(f"{path} does not set {key}")
        variants = {
            name: Variant(name, part["config"], part.get("init_args", {}), part.get("published"))
            for name, part in content["variants"].items()
        }
        return cls(path, content["task"], list(content["seeds"]), variants, content)

    @property
    def archives(self) -> list[str]:
        """Names of the table's own archives."""
        return list(self.content["archives"])

    def variant(self, name: str) -> Variant:
        """Return a variant of the table, or that of an attention file.

        Raises:
            ConfigError: neither.
        """
        if name in self.variants:
            return self.variants[name]
        if Path(name).suffix == ".yaml":
            attention_entry(name)
            return Variant(run_stem(name), name, {}, None)
        raise ConfigError(
            f"unknown variant {name!r}{nearest(name, self.variants)}; or give a file of "
            "configs/attention"
        )

    def recipe(self, archive: str) -> Recipe:
        """Return the recipe of an archive.

        Raises:
            DataError: no such archive.
        """
        check_name(archive)
        known = {**self.content["archives"], **self.content.get("extra", {})}
        part = known.get(archive, self.content["others"])
        protocol = self.content["protocols"][part["protocol"]]
        return Recipe(
            archive=archive,
            protocol=part["protocol"],
            epochs=part["epochs"],
            batch_size=part.get("batch_size", protocol["batch_size"]),
            model={**protocol["model"], **part["model"]},
            sizes=part["sizes"],
            published=part.get("published", {}),
        )


def all_archives() -> list[str]:
    """Names of the collection."""
    return list(ARCHIVES)
