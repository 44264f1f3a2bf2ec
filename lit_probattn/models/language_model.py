"""Causal language models: token embedding and positions, blocks, next token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lit_probattn.attention.cache import Cache
from lit_probattn.attention.layer import Attention
from lit_probattn.attention.packing import Packing, packing_of, refuse_beside_documents
from lit_probattn.base.arguments import arguments_of, takes
from lit_probattn.models.adaptive_softmax import AdaptiveSoftmax, FullSoftmax
from lit_probattn.models.embeddings import Positions, Sinusoid
from lit_probattn.models.transformer import Transformer
from lit_probattn.randomness import Dropout, RandomKey

Output = Literal["adaptive", "full"]
Initialisation = Literal["normal", "xavier"]

# Target of predictions that are not scored.
IGNORE = -100
_STD = 0.02


class LanguageModel(nn.Module):
    """Decoder-only language model whose output layer is tied to the token embedding.

        tokens · √C + positions ─ drop ─ Block × L ─ drop ─ output ─ log p(next token)

    Source: MGK, ICML 2022, appendix A.1.2 and its code; the defaults are its small model, which
    FiSH also uses. The value-aware paper's causal model is `positions=forward`,
    `output=full`, `output_bias=False`, `attention_bias=True` and `init=xavier`.
    Departs from the source: positions of a segment that is generated token by token count down from
    max_seq_len − 1, as in a full segment, since its final length is unknown.

    Args:
        dropout: dropout of embeddings, of both branches of a block and of the final output.
        positions: `reversed` or `forward` sinusoids, or `rotary` (with the attention's rotary_dim).
        output: adaptive or full softmax, tied to the token embedding.
        output_bias: whether every word has a bias.
        init: `normal`: all weight matrices and embeddings N(0, 0.02²), biases 0, norm weights
            N(1, 0.02²); `xavier`: weight matrices Xavier-uniform, biases 0, embedding N(0, 1/C). A
            variant's parameters other than projections keep their own initialisation.

    Raises:
        ValueError: `positions=rotary` without rotary attention, or inconsistent sizes.
    """

    @takes(
        *(Transformer, AdaptiveSoftmax, Sinusoid),
        without=("cross_attention", "activation_dropout", "norm_eps", "bias", "kind"),
        embed_dim=128,
        head_dim=16,
        num_layers=16,
        mlp_dim=2048,
        dropout=0.1,
        attention_dropout=0.0,
        attention_bias=False,
        norm_first=False,
        activation="relu",
    )
    def __init__(
        self,
        *,
        positions: Positions = "reversed",
        output: Output = "adaptive",
        output_bias: bool = True,
        init: Initialisation = "normal",
        **parts: Any,
    ) -> None:
        super().__init__()
        self.vocab_size: int = parts["vocab_size"]
        self.max_seq_len: int = parts["max_seq_len"]
        self.embed_dim: int = parts["embed_dim"]
        self.tokens = nn.Embedding(self.vocab_size, self.embed_dim)
        self.positions: Sinusoid | None = None
        if positions != "rotary":
            self.positions = Sinusoid(**arguments_of(Sinusoid, parts), kind=positions)
        self.dropout = Dropout(parts["dropout"])
        self.encoder = self.make_encoder(**arguments_of(Transformer, parts))
        kind = AdaptiveSoftmax if output == "adaptive" else FullSoftmax
        self.output: AdaptiveSoftmax | FullSoftmax = kind(
            bias=output_bias, **arguments_of(kind, parts)
        )
        if positions == "rotary":
            self._require_rotary()
        self._initialise(init)

    def make_encoder(self, **stack: Any) -> Transformer:
        """Return the stack of blocks; the arguments are those of `Transformer`."""
        return Transformer(**stack)

    def _require_rotary(self) -> None:
        layers = [module for module in self.modules() if isinstance(module, Attention)]
        if any(layer.rotary is None for layer in layers):
            raise ValueError(
                "positions=rotary, but the attention layers have no rotary positions: set the "
                "attention's "
                "rotary_dim, for example --model.init_args.attention.init_args.rotary_dim "
                f"{layers[0].head_dim - layers[0].head_dim % 2}"
            )

    @torch.no_grad()
    def _initialise(self, init: Initialisation) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                if init == "normal":
                    nn.init.normal_(module.weight, std=_STD)
                else:
                    nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.LayerNorm) and init == "normal":
                nn.init.normal_(module.weight, mean=1.0, std=_STD)
            elif isinstance(module, AdaptiveSoftmax):
                nn.init.normal_(module.cluster_weight, std=_STD)
        nn.init.normal_(self.tokens.weight, std=_STD if init == "normal" else self.embed_dim**-0.5)

    def forward(
        self,
        inputs: Tensor,
        *,
        key_mask: Tensor | None = None,
        rng: RandomKey | None = None,
        positions: Tensor | None = None,
        caches: Sequence[Cache] | None = None,
        cu_seqlens: Tensor | Packing | None = None,
    ) -> Tensor:
        """Return the input of the output layer, (B, N, C), for token ids (B, N).

        Padding is allowed only after the tokens of a segment, where causal attention ignores it;
        or, with `caches`, before them.

        Args:
            key_mask: real tokens, (B, N). None means all.
            rng: key of attention dropout and noise.
            positions: position of each token, (B, N), in segments of `max_seq_len` tokens, as
                passed by `generate`. None counts from 0 in segments of exactly these tokens;
                sinusoids with `caches` need positions.
            caches: keys and values of earlier tokens, from `new_caches`.
            cu_seqlens: bounds of packed documents over the B · N tokens, (D + 1,) integers, or a
                `Packing`. Each document is a segment; `rng.sample_ids` are then the documents',
                (D,).

        Raises:
            ValueError: a segment has more tokens than `max_seq_len`; packed documents are combined
                with positions or caches; or there are caches, but no positions.
        """
        packing = packing_of(cu_seqlens)
        if caches is not None and positions is None and self.positions is not None:
            raise ValueError(
                "received caches without positions: pass the position of each token in its "
                "segment, (B, N), counted over the tokens in the caches as well"
            )
        if packing is not None:
            refuse_beside_documents(positions=positions, caches=caches)
        x = self.encoder(
            self.embed(inputs, key_mask, positions, packing),  # (B, N, C)
            key_mask=None if caches is None else key_mask,
            query_mask=key_mask,
            is_causal=True,
            rng=rng,
            caches=caches,
            cu_seqlens=packing,
        )
        return self.dropout(x)

    def embed(
        self,
        inputs: Tensor,
        key_mask: Tensor | None = None,
        positions: Tensor | None = None,
        packing: Packing | None = None,
    ) -> Tensor:
        """Return the input of the first block, (B, N, C); arguments as in `forward`."""
        length = inputs.shape[1] if packing is None else packing.longest(*inputs.shape)
        if length > self.max_seq_len:
            raise ValueError(
                f"cannot embed a segment of {length} tokens: max_seq_len is {self.max_seq_len}"
            )
        x = self.tokens(inputs) * self.embed_dim**0.5
        if self.positions is not None:
            lengths: Tensor | int = self.max_seq_len
            if packing is not None:
                positions, _ = packing.positions(len(inputs), inputs.device)
                lengths = packing.token_lengths(len(inputs), inputs.device)
            elif positions is None:
                positions = torch.arange(length, device=inputs.device)
                lengths = length if key_mask is None else key_mask.sum(1, keepdim=True)
            x = x + self.positions(positions, lengths).to(x.dtype)
        return self.dropout(x)

    def token_losses(self, hidden: Tensor, target: Tensor) -> Tensor:
        """Return −log p of every scored target, in order, (num_scored,) float32.

        Args:
            hidden: result of `forward`, (B, N, C).
            target: next tokens, (B, N); IGNORE is not scored.
        """
        scored = target != IGNORE
        return self.output(hidden[scored], target[scored], self.tokens.weight)

    def log_probs(self, hidden: Tensor) -> Tensor:
        """Return the log-probabilities of all words, (…, V) float32, given `hidden` (…, C)."""
        return self.output.log_probs(hidden, self.tokens.weight)

    def new_caches(self, capacity: int = 0) -> list[Cache]:
        """Return an empty cache per layer."""
        return self.encoder.new_caches(capacity)

    def next_logits(
        self,
        inputs: Tensor,
        *,
        key_mask: Tensor | None,
        positions: Tensor,
        caches: Sequence[Cache],
        rng: RandomKey | None = None,
    ) -> Tensor:
        """Append tokens (B, n) to the caches; return the next token's log-probabilities, (B, V).

        Args:
            inputs: token ids.
            key_mask: real tokens. None means all.
            positions: positions of the tokens, (B, n), not counting padding.
            caches: keys and values of earlier tokens.
            rng: key of a variant's random draws at evaluation.
        """
        hidden = self(inputs, key_mask=key_mask, positions=positions, caches=caches, rng=rng)
        return self.log_probs(hidden[:, -1])
