"""Encoder-decoder for translation: source tokens and target prefix -> next token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lit_probattn.attention.cache import Cache, Memory
from lit_probattn.attention.layer import Attention, AttentionFactory
from lit_probattn.base.arguments import Count, Rate, takes
from lit_probattn.models.embeddings import Sinusoid
from lit_probattn.models.transformer import LayerCount, Transformer
from lit_probattn.randomness import Dropout, RandomKey

# The first ids of every vocabulary. A target starts after EOS and ends with it.
BOS, PAD, EOS, UNK = 0, 1, 2, 3

Share = Literal["decoder", "all", "none"]

# Separate the random draws of encoder and decoder.
_ENCODER, _DECODER = 0, 1


@dataclass
class DecoderState:
    """Decoding state of a batch of sentences.

    Args:
        caches: keys and values of earlier target tokens, one per block.
        memories: encoder memory projected by the cross-attention of every block.
    """

    caches: Sequence[Cache]
    memories: Sequence[Memory]

    @property
    def length(self) -> int:
        """Number of target tokens in the caches."""
        return self.caches[0].length

    @property
    def num_bytes(self) -> int:
        """Size of all caches in bytes."""
        kept = [*self.caches, *(memory.cache for memory in self.memories)]
        return sum(cache.num_bytes for cache in kept)

    def reorder(self, rows: Tensor, same_sources: bool = False) -> None:
        """Replace the batch by its rows `rows`, (B',) int64, which can repeat.

        `same_sources` states that sources do not change, so the encoder memory is not reordered.
        """
        for cache in self.caches:
            cache.reorder(rows)
        for memory in () if same_sources else self.memories:
            memory.reorder(rows)


class EncoderDecoder(nn.Module):
    """Transformer with cross-attention from the decoder to the encoder output.

        source · √C + positions ─ drop ─ Block × L ───────────── memory (B, S, C)
                                                                    │
        inputs · √C + positions ─ drop ─ Block × L, causal, cross ──┴── hidden ─ output ─ logits

    Source: Vaswani et al., 2017, as in fairseq's `transformer_iwslt_de_en`, which MGK (ICML 2022,
    section 3.3) and FiSH (NeurIPS 2022, sections 3.2 and A.4) train; the defaults are its sizes.
    Departs from the source: positions count tokens instead of skipping the padding id, which is
    equivalent for padding on the right; dropout and noise are keyed by `rng`.

    The initialisation is fairseq's: token embeddings and learned positions N(0, 1/C), padding zero;
    attention projections Xavier-uniform, those of queries, keys and values with gain 1/√2; all
    other parameters, including those of a variant, keep the default of PyTorch or the variant.

    Args:
        attention: factory of the attention layers that the next three arguments do not override.
        source_vocab_size: V of the source.
        vocab_size: V of the target.
        max_seq_len: maximum number of tokens of either side, EOS included.
        encoder_attention: factory of the encoder's layers. None means `attention`.
        decoder_attention: factory of the decoder's self-attention layers. None means `attention`.
        cross_attention: factory of the decoder's cross-attention layers. None means `attention`.
        num_encoder_layers, num_decoder_layers: number of blocks of each side.
        dropout: dropout of embeddings and of all branches of a block.
        activation_dropout: dropout within the MLPs, after the activation.
        positions: `sinusoidal`, or `learned` separately by each side.
        share: which token embeddings are tied: the decoder's input and output (`decoder`), also the
            source's (`all`), or none.

    Raises:
        ValueError: `share=all` with different vocabulary sizes, a vocabulary without words, a
            variant that does not support cross-attention, or an unknown choice.
    """

    @takes(
        *(Transformer, Sinusoid),
        without=("num_layers", "norm_eps", "share_layers", "kind"),
        embed_dim=512,
        head_dim=128,
        mlp_dim=1024,
        dropout=0.3,
        attention_dropout=0.0,
        attention_bias=True,
        norm_first=False,
        activation="relu",
    )
    def __init__(
        self,
        *,
        source_vocab_size: Count,
        vocab_size: Count,
        encoder_attention: AttentionFactory | None = None,
        decoder_attention: AttentionFactory | None = None,
        cross_attention: AttentionFactory | None = None,
        num_encoder_layers: LayerCount = 6,
        num_decoder_layers: LayerCount = 6,
        activation_dropout: Rate = 0.0,
        positions: Literal["sinusoidal", "learned"] = "sinusoidal",
        share: Share = "decoder",
        **stack: Any,
    ) -> None:
        super().__init__()
        attention: AttentionFactory = stack.pop("attention")
        embed_dim: int = stack["embed_dim"]
        max_seq_len: int = stack.pop("max_seq_len")
        _check(source_vocab_size, vocab_size, share)
        self.vocab_size, self.source_vocab_size = vocab_size, source_vocab_size
        self.max_seq_len, self.embed_dim = max_seq_len, embed_dim
        stack["activation_dropout"] = activation_dropout

        def places() -> nn.Module:
            if positions == "learned":
                return nn.Embedding(max_seq_len, embed_dim)
            return Sinusoid(max_seq_len=max_seq_len, embed_dim=embed_dim, kind="forward")

        self.source_tokens: nn.Embedding | None = None
        if share != "all":
            self.source_tokens = nn.Embedding(source_vocab_size, embed_dim, padding_idx=PAD)
        self.source_positions = places()
        self.encoder = Transformer(
            encoder_attention or attention, num_layers=num_encoder_layers, **stack
        )
        self.tokens = nn.Embedding(vocab_size, embed_dim, padding_idx=PAD)
        self.positions = places()
        self.decoder = Transformer(
            decoder_attention or attention,
            num_layers=num_decoder_layers,
            cross_attention=cross_attention or attention,
            **stack,
        )
        self.output: nn.Linear | None = None
        if share == "none":
            self.output = nn.Linear(embed_dim, vocab_size, bias=False)
        self.dropout = Dropout(stack["dropout"])
        self._initialise()

    @torch.no_grad()
    def _initialise(self) -> None:
        for module in self.modules():
            if isinstance(module, Attention):
                for proj in (module.query_proj, module.key_proj, module.value_proj):
                    nn.init.xavier_uniform_(proj.weight, gain=2**-0.5)
                nn.init.xavier_uniform_(module.out_proj.weight)
                if module.out_proj.bias is not None:
                    nn.init.zeros_(module.out_proj.bias)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=self.embed_dim**-0.5)
                if module.padding_idx is not None:
                    module.weight[module.padding_idx] = 0.0
        if self.output is not None:
            nn.init.normal_(self.output.weight, std=self.embed_dim**-0.5)

    def forward(
        self,
        source: Tensor,
        inputs: Tensor,
        *,
        source_mask: Tensor | None = None,
        key_mask: Tensor | None = None,
        rng: RandomKey | None = None,
    ) -> Tensor:
        """Return the input of the output layer, (B, T, C), for target tokens (B, T).

        Args:
            source: token ids, (B, S).
            inputs: EOS and the target without its last token, (B, T), padded on the right.
            source_mask: real tokens of the source, (B, S) bool. None means all.
            key_mask: real tokens of `inputs`, (B, T) bool. None means all.
            rng: key of attention dropout and noise.

        Raises:
            ValueError: a side is longer than `max_seq_len`.
        """
        memory = self.encode(source, source_mask, rng)
        return self.decode(inputs, memory, memory_mask=source_mask, key_mask=key_mask, rng=rng)

    def encode(
        self, source: Tensor, source_mask: Tensor | None = None, rng: RandomKey | None = None
    ) -> Tensor:
        """Return the encoder memory, (B, S, C)."""
        table = self.tokens if self.source_tokens is None else self.source_tokens
        x = self._embed("source", source, table, self.source_positions)  # (B, S, C)
        key = None if rng is None else rng.fold(_ENCODER)
        return self.encoder(x, key_mask=source_mask, query_mask=source_mask, rng=key)

    def decode(
        self,
        inputs: Tensor,
        memory: Tensor | None = None,
        *,
        memory_mask: Tensor | None = None,
        key_mask: Tensor | None = None,
        rng: RandomKey | None = None,
        state: DecoderState | None = None,
        is_causal: bool = True,
    ) -> Tensor:
        """Return the input of the output layer, (B, T, C).

        Args:
            inputs: token ids, (B, T); with a state, the tokens after those in its caches.
            memory: result of `encode`; not needed with a state.
            memory_mask: the source's mask.
            key_mask: real tokens of `inputs`. Causal attention does not attend to trailing padding.
            rng: key of attention dropout and noise.
            state: from `new_state`.
            is_causal: False lets tokens attend to later ones, for counting operations.
        """
        first = 0 if state is None else state.length
        x = self._embed("target", inputs, self.tokens, self.positions, first)  # (B, T, C)
        key = None if rng is None else rng.fold(_DECODER)
        if state is None:
            seen: Any = {"memory": memory, "memory_mask": memory_mask, "query_mask": key_mask}
        else:
            seen = {"memory": state.memories, "caches": state.caches}
        return self.decoder(x, is_causal=is_causal, rng=key, **seen)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of all words, (…, V), given `hidden` (…, C)."""
        if self.output is None:
            return nn.functional.linear(hidden, self.tokens.weight)
        logits: Tensor = self.output(hidden)
        return logits

    def new_state(
        self, memory: Tensor, memory_mask: Tensor | None = None, capacity: int = 0
    ) -> DecoderState:
        """Project an encoder memory for decoding, with space for `capacity` target tokens."""
        return DecoderState(
            self.decoder.new_caches(capacity), self.decoder.remember(memory, memory_mask)
        )

    def _embed(
        self, side: str, ids: Tensor, table: nn.Embedding, positions: nn.Module, first: int = 0
    ) -> Tensor:
        end = first + ids.shape[1]
        if end > self.max_seq_len:
            raise ValueError(
                f"cannot embed a {side} of {end} tokens: max_seq_len is {self.max_seq_len}"
            )
        index = torch.arange(first, end, device=ids.device)
        where = positions(index, end) if isinstance(positions, Sinusoid) else positions(index)
        x: Tensor = table(ids) * self.embed_dim**0.5
        return self.dropout(x + where.to(x.dtype))


def _check(source_vocab_size: int, vocab_size: int, share: Share) -> None:
    for name, size in (("source_vocab_size", source_vocab_size), ("vocab_size", vocab_size)):
        if size <= UNK + 1:
            raise ValueError(f"{name} must exceed the {UNK + 1} special tokens, received {size}")
    if share == "all" and source_vocab_size != vocab_size:
        raise ValueError(
            f"share=all requires one vocabulary, received source_vocab_size={source_vocab_size} "
            f"and vocab_size={vocab_size}; use share=decoder"
        )
