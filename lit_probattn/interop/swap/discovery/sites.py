"""What is known of a call of attention in a model: its site, its heads, the weights behind them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from torch import Tensor, nn

from lit_probattn.attention.call import HeadLayout
from lit_probattn.interop.weights import RotaryPairs

# How a model hands over its heads: to transformers' attention interface, to PyTorch's function, or
# not at all, as it takes the softmax of its products itself.
Way = Literal["interface", "function", "written"]
ROLES = ("query", "key", "value")


@dataclass(frozen=True)
class Rows:
    """Rows, or columns, of a parameter, by heads.

    Args:
        parameter: its name in the model.
        axis: of the parameter along which heads lie.
        starts: the first row of every head.
        step: from a row of a head to the next.
        size: rows of a head.
    """

    parameter: str
    axis: int
    starts: tuple[int, ...]
    step: int
    size: int

    def of(self, head: int) -> list[int]:
        """Return the rows of a head."""
        first = self.starts[head]
        return list(range(first, first + self.size * self.step, self.step))

    def all(self) -> list[int]:
        """Return the rows of all heads, head by head."""
        return [row for head in range(len(self.starts)) for row in self.of(head)]


@dataclass(frozen=True)
class Projections:
    """What makes and what reads the heads of a call.

    Args:
        weights: rows of weights for query, key and value; columns of one for `out`.
        biases: rows of biases for query, key and value, where there are any.
        rotary: how entries are paired that are rotated together. None means nothing is rotated.
        fixed: why heads cannot be joined; empty if they can.
        repeats: how often the host repeats each of its key heads before the call.
    """

    weights: dict[str, Rows]
    biases: dict[str, Rows]
    rotary: RotaryPairs | None = None
    fixed: str = ""
    repeats: int = 1

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON can hold it."""
        made = asdict(self)
        for part in ("weights", "biases"):
            for rows in made[part].values():
                rows["starts"] = list(rows["starts"])
        return made

    @classmethod
    def from_dict(cls, given: dict[str, Any]) -> Projections:
        """Return what `to_dict` wrote.

        Raises:
            TypeError: it is of another form.
        """
        parts = {
            name: {
                role: Rows(**{**rows, "starts": tuple(rows["starts"])})
                for role, rows in given[name].items()
            }
            for name in ("weights", "biases")
        }
        return cls(**parts, rotary=given["rotary"], fixed=given["fixed"], repeats=given["repeats"])


@dataclass
class Site:
    """A call of attention.

    Args:
        name: of the module whose forward makes the call; empty for the whole model.
        module: it.
        index: of the call among those of one forward.
        way: how the heads are handed over.
        layout: the host's heads.
        is_cross: whether queries attend to another sequence.
        where: file and line of the call.
        refusal: why it cannot be swapped; empty if it can.
        inputs: heads, masks and scale of the call, where it was seen.
        output: what the host made of them, (B, H, N, E_v).
        made: the weights that make and read its heads, where they were asked for.
        width: of the tokens that the module gets for its queries; 0 if it gets none.
        reader: the module that reads its results, if only one weight does.
        before: what that gave.
    """

    name: str
    module: nn.Module
    index: int
    way: Way
    layout: HeadLayout
    is_cross: bool
    where: str = ""
    refusal: str = ""
    inputs: dict[str, Any] = field(default_factory=dict)
    output: Tensor | None = None
    made: Projections | None = None
    width: int = 0
    reader: nn.Module | None = None
    before: Tensor | None = None
