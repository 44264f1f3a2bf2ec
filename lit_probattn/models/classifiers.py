"""Classifiers: token embedding, blocks, head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lit_probattn.base.arguments import arguments_of, takes
from lit_probattn.models.embeddings import TokenEmbedding
from lit_probattn.models.heads import PairClassifierHead, PooledClassifier
from lit_probattn.models.transformer import Transformer
from lit_probattn.randomness import RandomKey

# Arguments that are fixed in the source's encoder, or left to the attention.
_FIXED = ("norm_first", "activation", "activation_dropout", "cross_attention", "norm_eps")
_OF_ATTENTION = ("attention_dropout", "attention_bias")


class Classifier(nn.Module):
    """Sequence classifier of the Long Range Arena experiments.

    Source: MGK, ICML 2022, appendix A.1.1; sizes of its base code: embed_dim 64, head_dim 32,
    2 pre-norm layers, mlp_dim 128, head 64 -> 128 -> classes; its options of tied layers, class
    token and fixed positions.

    Args:
        mlp_dim: width of the hidden layer in each block and in the head.
        dropout: dropout of embeddings and of both branches of a block. Attention dropout is an
            argument of the attention.
    """

    # The head; subclasses can replace it by another with the same arguments.
    head_class: ClassVar[Callable[..., nn.Module]] = PooledClassifier

    @takes(
        *(Transformer, TokenEmbedding, PooledClassifier),
        without=("init_std", "class_token", "hidden_dim", *_FIXED, *_OF_ATTENTION),
        dropout=0.1,
    )
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.embedding = TokenEmbedding(
            class_token=options["pooling"] == "cls", **arguments_of(TokenEmbedding, options)
        )
        self.encoder = Transformer(**arguments_of(Transformer, options))
        head = arguments_of(PooledClassifier, options)
        self.head = self.head_class(hidden_dim=options["mlp_dim"], **head)

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return self.embedding.vocab_size

    def forward(
        self, inputs: Tensor, *, key_mask: Tensor | None = None, rng: RandomKey | None = None
    ) -> Tensor:
        """Map token ids (B, N) to logits (B, num_classes).

        `key_mask` (B, N) marks real tokens; `rng` is the key of attention dropout and noise.
        """
        x = self.embedding(inputs)  # (B, N, C), one more position with a class token
        if key_mask is not None and self.embedding.class_token is not None:
            key_mask = nn.functional.pad(key_mask, (1, 0), value=True)
        x = self.encoder(x, key_mask=key_mask, query_mask=key_mask, rng=rng)  # (B, N, C)
        return self.head(x, key_mask)  # (B, num_classes)


class PairClassifier(Classifier):
    """Classifier of pairs of texts: a shared encoder, then a head that compares both texts.

    Both texts are encoded in one call, as 2 B sequences in the order (first, second) of each pair.
    An attention with M-step priors (setting B) therefore accumulates joint statistics.

    Source: MGK, ICML 2022, the Retrieval model of its base code.
    Departs from the source: there the encoder is called once per text, hence two M-step updates
    per batch.
    """

    head_class = PairClassifierHead

    def forward(
        self, inputs: Tensor, *, key_mask: Tensor | None = None, rng: RandomKey | None = None
    ) -> Tensor:
        """Map token ids of pairs, (B, 2, N), to logits (B, num_classes).

        `key_mask` has the same shape. The sample ids of `rng` are those of pairs; the texts of
        pair i use sample ids 2 i and 2 i + 1.

        Raises:
            ValueError: `inputs` has another shape.
        """
        if inputs.dim() != 3 or inputs.shape[1] != 2:
            raise ValueError(f"expected pairs (B, 2, N), received inputs {tuple(inputs.shape)}")
        mask = None if key_mask is None else key_mask.flatten(0, 1)  # (2 B, N)
        return super().forward(inputs.flatten(0, 1), key_mask=mask, rng=_key_of_texts(rng))


def _key_of_texts(rng: RandomKey | None) -> RandomKey | None:
    """Expand a key of B pairs to 2 B texts, so that both texts have different draws."""
    if rng is None or rng.sample_ids is None:
        return rng  # without ids, the 2 B texts are numbered implicitly
    ids = 2 * rng.sample_ids
    return replace(rng, sample_ids=torch.stack([ids, ids + 1], dim=1).flatten())
