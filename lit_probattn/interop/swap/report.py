"""The report of a swap, layer by layer, and the recipe that repeats it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lit_probattn.base.progress import aligned


@dataclass(frozen=True)
class LayerReport:
    """One attention layer; pairs are before and after.

    Args:
        name: its name in the model.
        kind: the host's class.
        action: `swapped`, or why it was kept.
        heads: query heads.
        kv_heads: key heads.
        components: keys per key head and position.
        parameters: of the layer, including its output projection.
        cache_bytes: of the keys and values of one token, in the dtype of the layer.
        error: ‖new − old‖ / ‖old‖ of the layer's output on random tokens. None if not measured.
        groups: the merged query heads of every head. None means that no heads were merged.
        note: why the error was not measured.
        output: name of its output projection, if that is outside the layer.
    """

    name: str
    kind: str
    action: str
    heads: tuple[int, int] = (0, 0)
    kv_heads: tuple[int, int] = (0, 0)
    components: tuple[int, int] = (1, 1)
    parameters: tuple[int, int] = (0, 0)
    cache_bytes: tuple[int, int] = (0, 0)
    error: float | None = None
    groups: list[list[int]] | None = None
    note: str = ""
    output: str = ""

    @property
    def swapped(self) -> bool:
        """Whether the layer was swapped."""
        return self.action == "swapped"

    def cells(self) -> list[str]:
        """Return the layer's row of the table."""
        if not self.swapped:
            return [self.name, self.kind, self.action, "", "", "", "", ""]
        error = self.note or "not measured"
        if self.error is not None:
            error = f"{self.error:.1e}"
        pairs = (self.heads, self.kv_heads, self.parameters, self.cache_bytes)
        heads, kv, parameters, cache = (_arrow(pair) for pair in pairs)
        keys = f"{kv} x {self.components[1]}"
        return [self.name, self.kind, self.action, error, heads, keys, parameters, cache]


_HEADS = (
    *("layer", "class", "action", "error", "heads"),
    *("key heads x components", "parameters", "cache bytes/token"),
)


@dataclass(frozen=True)
class Report:
    """The report of a swap; printed as a table.

    Args:
        layers: all attention layers.
        recipe: argument of `swap` instead of a variant, to build the same model again; plain values
            for JSON.
        summary: lines below the table.
    """

    layers: list[LayerReport]
    recipe: dict[str, Any]
    summary: list[str] = field(default_factory=list)

    @property
    def swapped(self) -> list[LayerReport]:
        """The layers that were swapped."""
        return [layer for layer in self.layers if layer.swapped]

    def __str__(self) -> str:
        """Return the table and the summary."""
        rows = [_HEADS, *(layer.cells() for layer in self.layers)]
        return "\n".join([*aligned(rows), *self.summary])


def _arrow(pair: tuple[int, int]) -> str:
    before, after = pair
    return str(after) if before == after else f"{before} -> {after}"
