"""Language models as built by MGK's released code, where it differs from the paper.

Only the task in `configs/tasks/as_released/` uses these models.
"""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor, nn

from lit_probattn.base.arguments import takes
from lit_probattn.models.language_model import LanguageModel
from lit_probattn.models.transformer import Block, Transformer

PreNorm = Literal["keys", "residual"]


class RawQueryBlock(Block):
    """A pre-norm block whose queries are not normalised; keys and values are.

    x ─┬──────── query ─────────────────┐
       ├─ norm1 ─ key, value ─ attention ─ drop ─ + ─┬─ norm2 ─ mlp ─ + ─
       └─────────────────────────────────────────────┘└───────────────┘
    """

    def before_attention(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the input, itself as queries, and the normalised keys; (B, N, C) each."""
        return x, x, self.norm1(x)


class NormedResidualBlock(Block):
    """A pre-norm block whose first residual path carries the normalised input.

    x ─ norm1 ─┬─ attention ─ drop ─ + ─┬─ norm2 ─ mlp ─ + ─
               └─────────────────────┘  └───────────────┘
    """

    def before_attention(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the normalised input, (B, N, C), for the residual path and as queries."""
        x = self.norm1(x)
        return x, x


class ReleasedTransformer(Transformer):
    """A stack of these blocks, without a final norm."""

    def __init__(self, *, pre_norm: PreNorm, **stack: Any) -> None:
        self.block_class = RawQueryBlock if pre_norm == "keys" else NormedResidualBlock
        super().__init__(**stack)
        self.norm = nn.Identity()


class ReleasedLanguageModel(LanguageModel):
    """`LanguageModel` with pre-norm as in the released code.

    Source: released code of MGK, ICML 2022, language model (`pre_lnorm`).
    Departs from the source: nothing; `LanguageModel` with `norm_first=True` is the usual pre-norm.

    Args:
        pre_norm: `keys` (softmax, MGK): keys and values, also those of earlier segments, are
            projected from normalised tokens, queries from raw ones. `residual` (linear attention,
            MLK): all are normalised, and so is the residual path. Neither has a final norm.

    Raises:
        ValueError: unknown `pre_norm`; see also `LanguageModel`.
    """

    @takes(LanguageModel, without=("norm_first",))
    def __init__(self, *, pre_norm: PreNorm = "keys", **options: Any) -> None:
        self.pre_norm: PreNorm = pre_norm
        super().__init__(norm_first=True, **options)

    def make_encoder(self, **stack: Any) -> Transformer:
        """Return the stack of blocks."""
        return ReleasedTransformer(pre_norm=self.pre_norm, **stack)
