"""Tasks with models as built by the released code, for `configs/tasks/as_released/`."""

from collections.abc import Mapping
from typing import Any

from lit_probattn.base.arguments import arguments_of, takes
from lit_probattn.models.language_model import LanguageModel
from lit_probattn.models.released.language_model import ReleasedLanguageModel
from lit_probattn.tasks.language_model import LanguageModeling


class ReleasedLanguageModeling(LanguageModeling):
    """`LanguageModeling` with pre-norm as in the released code of MGK, ICML 2022."""

    @takes(ReleasedLanguageModel, LanguageModeling, without=("norm_first",))
    def __init__(self, **options: Any) -> None:
        self._pre_norm = options["pre_norm"]
        super().__init__(norm_first=True, **arguments_of(LanguageModeling, options))

    def make_model(self, options: Mapping[str, Any]) -> LanguageModel:
        """Return the model for the options of the task."""
        model = arguments_of(ReleasedLanguageModel, options)
        return ReleasedLanguageModel(pre_norm=self._pre_norm, **model)
