"""Masked language models: token ids with masked tokens -> blocks -> original tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lit_probattn.attention.packing import Packing
from lit_probattn.base.arguments import arguments_of, takes
from lit_probattn.models.adaptive_softmax import FullSoftmax
from lit_probattn.models.language_model import IGNORE
from lit_probattn.models.text_encoder import TextEncoder
from lit_probattn.randomness import STREAM_MASKING, RandomKey, philox4x32

# The last ids are reserved for begin, end and mask, unless a mask token is specified.
NUM_SPECIAL = 3
# Fractions of the chosen tokens that become the mask token or a random token.
_SHARE_MASKED, _SHARE_RANDOM = 0.8, 0.1


def mask_tokens(
    inputs: Tensor,
    target: Tensor,
    key: RandomKey,
    *,
    vocab_size: int,
    probability: float = 0.15,
    mask_token: int | None = None,
    packing: Packing | None = None,
) -> tuple[Tensor, Tensor]:
    """Mask tokens as a pure function of (seed, step, sample, position).

    Source: BERT (Devlin et al., 2019), dynamic as in RoBERTa: every token is chosen with
    `probability`; of the chosen, 80 % become the mask token, 10 % a random token, 10 % are
    unchanged.
    Departs from the source: choices are independent; the number of chosen tokens varies.

    Args:
        inputs: token ids, (B, N).
        target: the same ids, IGNORE for tokens that are never masked (padding, begin, end), (B, N).
        key: random key; counter (position, 0, 0, sample).
        vocab_size: V.
        mask_token: id of the mask token; random tokens are any id, as in BERT. None means that the
            mask token is V − 1 and random tokens are below V − 3.
        packing: packed sequences of the tokens, which are the key's samples; positions start at 0
            in each, so a sequence has the masks that it has alone.

    Returns:
        The masked inputs, and the target with IGNORE for tokens that were not chosen.
    """
    batch, length = inputs.shape
    if packing is None:
        positions = torch.arange(length, device=inputs.device).view(1, -1)
        samples = key.samples(batch, inputs.device).view(-1, 1)
    else:
        packing.check(batch, length, length)
        positions, _ = packing.positions(batch, inputs.device)
        ids = key.samples(packing.num_documents, inputs.device)
        samples = packing.per_token(ids).view(batch, -1)
    zero = torch.zeros((), dtype=torch.int64, device=inputs.device)
    words = philox4x32((positions, zero, zero, samples), key.philox_key(STREAM_MASKING))
    choice, kind, word, _ = words
    chosen = (choice < round(probability * 2**32)) & (target != IGNORE)
    masked = kind < round(_SHARE_MASKED * 2**32)
    random = ~masked & (kind < round((_SHARE_MASKED + _SHARE_RANDOM) * 2**32))
    num_words = vocab_size - NUM_SPECIAL if mask_token is None else vocab_size
    hidden = torch.where(masked, vocab_size - 1 if mask_token is None else mask_token, inputs)
    hidden = torch.where(random, (word * num_words) >> 32, hidden)
    return torch.where(chosen, hidden, inputs), torch.where(chosen, target, IGNORE)


class MaskedLanguageModel(TextEncoder):
    """RoBERTa-style bidirectional encoder with an output layer tied to the token embedding.

        encoder ─ dense ─ gelu ─ norm ─ log p(word)

    With `next_sentence` it also predicts whether the second part of a sequence follows the first,
    as in BERT:

        encoder's first token ─ pooler ─ tanh ─ next_sentence ─ log p(follows, elsewhere)

    Source: RoBERTa (Liu et al., 2019), which the value-aware paper (section 4, A.1) trains; BERT
    (Devlin et al., 2019).
    Departs from the source: no pre-trained weights; sizes are arguments.

    Args:
        next_sentence: whether to also predict if the second part of a sequence follows the
            first; batches then have `elsewhere` (B,), 1 if it does not.

    Raises:
        ValueError: fewer than four token ids.
    """

    @takes(TextEncoder, FullSoftmax, without=("bias",))
    def __init__(
        self,
        *,
        next_sentence: bool = False,
        **options: Any,
    ) -> None:
        vocab_size: int = options["vocab_size"]
        if vocab_size <= NUM_SPECIAL:
            raise ValueError(
                f"vocab_size must exceed the {NUM_SPECIAL} special tokens, received {vocab_size}"
            )
        super().__init__(**arguments_of(TextEncoder, options))
        embed_dim = options["embed_dim"]
        self.head = nn.Sequential(
            nn.Linear(embed_dim, embed_dim),
            nn.GELU(),
            nn.LayerNorm(embed_dim, eps=options["norm_eps"]),
        )
        self.output = FullSoftmax(**arguments_of(FullSoftmax, options))
        self.pooler = nn.Linear(embed_dim, embed_dim) if next_sentence else None
        self.next_sentence = nn.Linear(embed_dim, 2) if next_sentence else None
        self._initialise()

    def forward(
        self,
        inputs: Tensor,
        *,
        key_mask: Tensor | None = None,
        token_types: Tensor | None = None,
        rng: RandomKey | None = None,
        with_pairs: bool = False,
        cu_seqlens: Tensor | Packing | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return the input of the output layer, (B, N, C), for token ids (B, N).

        The other arguments are those of `encode`; `inputs` are masked by `mask_tokens`.

        Args:
            with_pairs: also return the logits of the second part following the first or coming from
                elsewhere, (B, 2).

        Raises:
            ValueError: there are more tokens than `max_seq_len`, the model has no next_sentence, or
                it classifies pairs and sequences are packed.
        """
        if with_pairs and cu_seqlens is not None:
            raise ValueError(
                "next_sentence does not support packed sequences (cu_seqlens): set pack of the "
                "data or next_sentence to false"
            )
        given: Any = {"key_mask": key_mask, "token_types": token_types, "cu_seqlens": cu_seqlens}
        encoded = self.encode(inputs, **given, rng=rng)
        hidden: Tensor = self.head(encoded)
        if not with_pairs:
            return hidden
        if self.pooler is None or self.next_sentence is None:
            raise ValueError("with_pairs requires a model with next_sentence=True")
        return hidden, self.next_sentence(torch.tanh(self.pooler(encoded[:, 0])))

    def token_losses(self, hidden: Tensor, target: Tensor) -> Tensor:
        """Return −log p of every target that is not IGNORE, in order, (num_scored,) float32."""
        scored = target != IGNORE
        return self.output(hidden[scored], target[scored], self.tokens.weight)

    def predictions(self, hidden: Tensor, target: Tensor) -> Tensor:
        """Return the most likely word of every target that is not IGNORE, in order."""
        rows = hidden[target != IGNORE]
        count = max(1, self.output.max_logits // self.vocab_size)
        parts = [self.output.log_probs(part, self.tokens.weight) for part in rows.split(count)]
        return torch.cat([part.argmax(-1) for part in parts]) if parts else rows.new_zeros(0).long()
