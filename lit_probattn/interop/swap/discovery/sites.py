"""An attention call of a model: its site, its heads, the weights of its projections."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from torch import Tensor, nn

from lit_probattn.attention.call import HeadLayout
from lit_probattn.interop.weights import RotaryPairs

# How a model computes attention: through transformers' attention interface, PyTorch's function, or
# a softmax of its products in separate operations.
Way = Literal["interface", "function", "written"]
ROLES = ("query", "key", "value")


@dataclass(frozen=True)
class Rows:
    """Rows, or columns, of a parameter, by heads.

    Args:
        parameter: name in the model.
        axis: axis of the parameter with the heads.
        starts: first row of every head.
        step: distance between rows of a head.
        size: number of rows of a head.
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
    """The weights that compute and read the heads of a call.

    Args:
        weights: rows of weights for query, key and value; columns of one for `out`.
        biases: rows of biases for query, key and value, if any.
        rotary: pairs of dimensions that are rotated together. None means no rotation.
        fixed: why heads cannot be joined; empty if they can.
        repeats: number of times the host repeats each key head before the call.
    """

    weights: dict[str, Rows]
    biases: dict[str, Rows]
    rotary: RotaryPairs | None = None
    fixed: str = ""
    repeats: int = 1

    def to_dict(self) -> dict[str, Any]:
        """Return values that JSON supports."""
        made = asdict(self)
        for part in ("weights", "biases"):
            for rows in made[part].values():
                rows["starts"] = list(rows["starts"])
        return made

    @classmethod
    def from_dict(cls, given: dict[str, Any]) -> Projections:
        """Return the object from the values of `to_dict`.

        Raises:
            TypeError: the values have another form.
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
    """An attention call.

    Args:
        name: name of the module whose forward makes the call; empty for the whole model.
        module: the module.
        index: index of the call within one forward.
        way: how the module computes attention.
        layout: the host's heads.
        is_cross: whether queries attend to another sequence.
        where: file and line of the call.
        refusal: why it cannot be swapped; empty if it can.
        inputs: heads, masks and scale of the call, if recorded.
        output: result of the host, (B, H, N, E_v).
        made: weights that compute and read its heads, if requested.
        width: width of the tokens that the module receives for its queries; 0 if it receives none.
        reader: module that reads its results, if only one weight does.
        before: output of that module.
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
