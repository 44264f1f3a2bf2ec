"""Tasks with models as the released code builds them; `configs/tasks/as_released/` names them."""

from typing import Any

from lit_probattn.attention import AttentionFactory
from lit_probattn.models.language_model import LanguageModel
from lit_probattn.models.released.language_model import PreNorm, ReleasedLanguageModel
from lit_probattn.tasks.language_model import LanguageModeling


class ReleasedLanguageModeling(LanguageModeling):
    """`LanguageModeling` with pre-norm as the released code of MGK, ICML 2022, has it.

    Args:
        pre_norm: `keys`: queries are read from raw tokens, keys and values from normalised ones
            (softmax, MGK). `residual`: all are normalised, the residual path too (linear, MLK).
            Neither has a final norm.
        common: the other arguments of `LanguageModeling`, without `norm_first`.
    """

    def __init__(
        self,
        attention: AttentionFactory,
        vocab_size: int,
        max_seq_len: int,
        pre_norm: PreNorm = "keys",
        **common: Any,
    ) -> None:
        self._pre_norm: PreNorm = pre_norm
        super().__init__(attention, vocab_size, max_seq_len, norm_first=True, **common)
        self.keep_arguments()

    def make_model(self, attention: AttentionFactory, **arguments: Any) -> LanguageModel:
        """Return the model."""
        return ReleasedLanguageModel(attention, pre_norm=self._pre_norm, **arguments)
