"""Base of fine-tuning tasks: BERT's optimiser, inputs of a text encoder."""

from __future__ import annotations

from typing import Any

from torch.optim import AdamW, Optimizer

from lit_probattn.tasks.base import Task
from lit_probattn.tasks.parameter_order import groups_of_bert

# Defaults of the tasks: BERT's model and optimiser.
BERT: dict[str, Any] = {
    "dropout": 0.1,
    "attention_dropout": 0.1,
    "num_token_types": 2,
    "norm_eps": 1e-12,
    "lr": 3e-5,
    "weight_decay": 0.01,
    "schedule": "linear",
}


class FineTuning(Task):
    """A task without weight decay on biases and layer norms.

    Source: BERT (Devlin et al., 2019): Adam with decoupled weight decay 0.01, linear warm-up over a
    tenth of the steps and linear decay.
    """

    model: Any

    def configure_optimizers(self) -> Optimizer:
        """Return AdamW, without weight decay on biases and layer norms."""
        return self.make_optimizer(AdamW, groups_of_bert(self.model))

    def encoder_inputs(self, batch: Any) -> dict[str, Any]:
        """Return the arguments of the model for a batch.

        Token types are omitted if the model does not use them.
        """
        inputs = {"inputs": batch["inputs"], "key_mask": batch["key_mask"]}
        if self.model.num_token_types:
            inputs["token_types"] = batch["token_types"]
        return {**inputs, "rng": self.random_key(batch)}

    def setup(self, stage: str) -> None:
        """Check that the model supports the token types of the data.

        Raises:
            ValueError: the model has too few; see also `Task.setup`.
        """
        super().setup(stage)
        needed = getattr(self.datamodule, "num_token_types", 0)
        there = self.model.num_token_types
        if there and there < needed:
            raise ValueError(
                f"the data's tokeniser has {needed} token types, received num_token_types {there}: "
                f"set --model.init_args.num_token_types {needed}, or 0 to disable token types"
            )
