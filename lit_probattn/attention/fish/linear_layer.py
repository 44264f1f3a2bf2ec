"""The linear FiSH layer: LFiSH, Hard LFiSH, GLFiSH and Hard GLFiSH by its options."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from torch import Tensor

from lit_probattn.attention.backends import AutoRule, Backend, Call
from lit_probattn.attention.cache import Cache
from lit_probattn.attention.fish.cost import linear_fish_flops, linear_fish_macs
from lit_probattn.attention.fish.functions import ScoreNoise
from lit_probattn.attention.fish.layer import count_global_heads, noise_key
from lit_probattn.attention.fish.linear import (
    LFiSHMode,
    LinearFiSHForm,
    LinearFiSHState,
    Normalizer,
    StateNormalizer,
    linear_fish_blockwise,
    linear_fish_reference,
    linear_fish_refusal,
    linear_fish_triton,
)
from lit_probattn.attention.fish.mixing import (
    HeadMixing,
    MixingConstraint,
    MixingInit,
    NoiseScale,
    SigmaParam,
    SigmaShape,
    check_choice,
)
from lit_probattn.attention.layer import Attention, BackendFunction, Cost
from lit_probattn.attention.linear.features import FeatureMap
from lit_probattn.attention.linear.functions import CHUNK_RULES
from lit_probattn.attention.masks import Masks
from lit_probattn.randomness import AttentionDropout, RandomKey


class LinearFiSHAttention(Attention):
    """Linear attention whose H local states are mixed from G global ones, in O(N).

    Source: FiSH, NeurIPS 2022, appendix A.6, which says that global KᵀV are formed and local ones
    sampled from them. With ψ(x) = elu(x) + 1, S_k = Σ_n ψ(key[k, n]) value[k, n]ᵀ:
        LFiSH   S_loc[j] = Σ_k p_kj (S_k + s_k ε_k)                     mixer=linear
        GLFiSH  S_loc = W_2 ReLU(W_1 (S + s ε) + b_1) + b_2, per cell   mixer=mlp
        out[j, i] = ψ(query[j, i])ᵀ S_loc[j] / (ψ(query[j, i])ᵀ Σ_k r_kj z_k + eps)
        noise=none makes them Hard.
    Departs from the source: all beyond its one sentence is ours; no code was released. The
    normaliser has weights r ≥ 0 of its own, so that it stays positive for free p. The other
    readings are options. Attention dropout drops whole values, as in linear attention.

    Args:
        embed_dim: C.
        head_dim: E, of queries and keys.
        num_heads: H, local heads: outputs, and queries except in score_global.
        num_global_heads: G, at most H. None means ⌈H / head_ratio⌉.
        head_ratio: local heads per global head, where `num_global_heads` is None.
        lfish_mode: `kv_global`: keys and values have G heads. `key_global`: keys have G heads,
            values H: S_loc[j] = (Σ_k p_kj ψ(key_k))ᵀ value_j. `score_global`: queries and keys have
            G heads, values H: local maps are Σ_k p_kj ψ(query_k) ψ(key_k)ᵀ.
        mixer: `linear`, or `mlp` (kv_global only).
        mixer_ratios: hidden widths of `mlp` as ⌈H / ratio⌉; None means one layer of H.
        mixing: `relaxed` or `simplex` (linear only).
        mixing_init: see `FiSHAttention`.
        mixing_bias: biases of `mlp`; the last one matters here.
        noise: `global` (one draw of E x E_v per sequence and global head, the same for all
            positions) or `none`.
        noise_scale: s at the start, positive.
        sigma_shape: one s per global head, or one for all.
        sigma_param: what the parameter of s holds.
        noise_at_eval: draw noise at evaluation too; keyed by seed and sample, so it repeats.
        normalizer: `tied_abs`: r = |p|; `nonneg`: softplus of parameters, 1/G at the start; `none`:
            a root mean square norm per head; `auto`: `tied_abs` for linear mixing, else `nonneg`.
        eps: added to the normaliser.
        sum_normalize: divide features by their sum and the output by √E (released code of the
            language model that the paper builds on).
        key_embed_dim: width of keys and values in cross-attention.
        value_head_dim: size of a value head.
        bias: biases of the four projections.
        dropout: probability of dropping a value in training.
        backend: `blockwise` is the O(N) form, `triton` (kv_global, mixer=linear) its kernels.

    Raises:
        ValueError: more global than local heads, or choices that exclude each other.
    """

    variant: ClassVar[str] = "linear_fish"
    backends: ClassVar[dict[str, BackendFunction]] = {
        "reference": linear_fish_reference,
        "blockwise": linear_fish_blockwise,
        "triton": linear_fish_triton,
    }
    auto_rules: ClassVar[dict[str, AutoRule]] = CHUNK_RULES

    def __init__(
        self,
        embed_dim: int,
        head_dim: int,
        num_heads: int,
        *,
        num_global_heads: int | None = None,
        head_ratio: float = 2.0,
        lfish_mode: LFiSHMode = "kv_global",
        mixer: Literal["linear", "mlp"] = "linear",
        mixer_ratios: Sequence[float] | None = None,
        mixing: MixingConstraint = "relaxed",
        mixing_init: MixingInit = "torch_linear",
        mixing_bias: bool = True,
        noise: Literal["none", "global"] = "global",
        noise_scale: float = 0.01,
        sigma_shape: SigmaShape = "per_global",
        sigma_param: SigmaParam = "squared",
        noise_at_eval: bool = False,
        normalizer: Normalizer = "auto",
        eps: float = 1e-6,
        sum_normalize: bool = False,
        key_embed_dim: int | None = None,
        value_head_dim: int | None = None,
        bias: bool = True,
        dropout: float = 0.0,
        backend: Backend = "auto",
    ) -> None:
        check_choice("lfish_mode", lfish_mode, ("kv_global", "key_global", "score_global"))
        self.lfish_mode: LFiSHMode = lfish_mode
        self.num_global_heads = count_global_heads(num_heads, num_global_heads, head_ratio)
        super().__init__(
            embed_dim,
            head_dim,
            num_heads,
            key_embed_dim=key_embed_dim,
            value_head_dim=value_head_dim,
            bias=bias,
            dropout=dropout,
            backend=backend,
        )
        check_choice("mixer", mixer, ("linear", "mlp"))
        check_choice("noise", noise, ("none", "global"))
        if mixer == "mlp" and lfish_mode != "kv_global":
            raise ValueError(
                f"mixer=mlp mixes global states, which lfish_mode={lfish_mode} does not have; use "
                "lfish_mode=kv_global"
            )
        if not 0.0 <= eps < 1.0:
            raise ValueError(f"eps must be in [0, 1), received {eps}")
        self.noise_kind, self.noise_at_eval = noise, noise_at_eval
        self.mixing = HeadMixing(
            self.num_global_heads,
            num_heads,
            mixer=mixer,
            constraint=mixing,
            init=mixing_init,
            bias="all" if mixer == "mlp" and mixing_bias else "none",
            last_bias_matters=True,
            ratios=(1.0,) if mixer_ratios is None else tuple(mixer_ratios),
        )
        self.normalizer = StateNormalizer(self.mixing, normalizer)
        self.form = LinearFiSHForm(
            mode=lfish_mode,
            features=FeatureMap("elu", "sum" if sum_normalize else "none"),
            divides=self.normalizer.kind != "none",
            eps=eps,
            output_factor=head_dim**-0.5 if sum_normalize else 1.0,
        )
        self.noise_scale: NoiseScale | None = None
        if noise != "none":
            self.noise_scale = NoiseScale(
                self.num_global_heads, shape=sigma_shape, param=sigma_param, start=noise_scale
            )

    @property
    def num_query_heads(self) -> int:
        """Queries are local, except where scores are global."""
        return self.num_global_heads if self.lfish_mode == "score_global" else self.num_heads

    @property
    def num_value_heads(self) -> int:
        """Values are global where states are."""
        return self.num_global_heads if self.lfish_mode == "kv_global" else self.num_heads

    @property
    def key_width(self) -> int:
        """Keys are global."""
        return self.num_global_heads * self.head_dim

    def split_keys(self, key: Tensor) -> Tensor:
        """(B, L, G·E) -> (B, G, L, E)."""
        return key.unflatten(-1, (self.num_global_heads, -1)).transpose(1, 2)

    def score_arguments(self, num_keys: int) -> dict[str, Any]:
        """Return mixing, normaliser weights and switches for the backend functions."""
        scale = None if self.noise_scale is None else self.noise_scale()
        values = self.mixing.values(scale)
        return {
            "form": self.form,
            "mixing": values,
            "last_bias": self.mixing.last_bias,
            "norm_mix": self.normalizer(values.weights[0]),
        }

    def random_arguments(self, rng: RandomKey | None, first_row: int) -> dict[str, Any]:
        """Return the noise of one call, if any; one draw serves all positions."""
        if self.noise_kind == "none" or not (self.training or self.noise_at_eval):
            return {}
        key = noise_key(rng, self.training)
        return {"noise": ScoreNoise("global", key, self.num_global_heads)}

    def reference_scores(self, query: Tensor, key: Tensor, **arguments: Any) -> Tensor:
        """Refuse: local heads have states, and one pair has a weight per global head."""
        raise NotImplementedError(
            "linear FiSH mixes states, so its local heads have no attention maps; analyse "
            "FiSHAttention or LinearAttention instead"
        )

    def unsupported(self, backend: str, call: Call) -> str | None:
        """There are no pairs to mask."""
        if backend == "triton":
            return linear_fish_refusal(self, call)
        if call.attn_mask:
            return "cannot apply attn_mask, because it forms no pairs (use key_mask, is_causal)"
        return super().unsupported(backend, call)

    # ------------------------------------------------------------------ the call
    def _prepare(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        key_mask: Tensor | None,
        attn_mask: Tensor | None,
        is_causal: bool,
        bias: Tensor | None,
        cache: Cache | None,
    ) -> tuple[Tensor, Tensor, Tensor, Masks]:
        if bias is not None:
            raise ValueError(
                "linear FiSH has no scores before a softmax to add a bias to; use FiSHAttention"
            )
        if cache is not None and not isinstance(cache, LinearFiSHState):
            raise ValueError(
                f"linear FiSH decodes from a LinearFiSHState, received {type(cache).__name__}: "
                "make it by layer.new_cache()"
            )
        return super()._prepare(query, key, value, key_mask, attn_mask, is_causal, bias, cache)

    def run(
        self,
        backend: str,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        masks: Masks,
        dropout: AttentionDropout | None,
        arguments: dict[str, Any],
        cache: Cache | None,
    ) -> Tensor:
        """Compute the heads' outputs; with a state, go on from it."""
        arguments = {**arguments, "masks": masks, "dropout": dropout}
        state = cache if isinstance(cache, LinearFiSHState) else None
        return self.backends[backend](query, key, value, state=state, **arguments)

    def new_cache(self, capacity: int = 0) -> LinearFiSHState:
        """Return an empty state; `capacity` does not matter, its size is constant."""
        return LinearFiSHState()

    def cost(self, seq_len: int) -> Cost:
        """Return the cost of the O(N) form without a causal mask (specification b.5).

        kv_global, multiply-adds: NC(HE + GE + GE_v + HE_v) + NGEE_v + HGEE_v (GLFiSH: its two
        layers) + NHEE_v + NHE + GHE. The paper gives no formula; `paper_flops` counts these parts
        by the convention of its appendix D.
        """
        sizes: dict[str, Any] = {
            "seq_len": seq_len,
            "embed_dim": self.embed_dim,
            "key_embed_dim": self.key_embed_dim,
            "head_dim": self.head_dim,
            "value_dim": self.value_head_dim,
            "num_heads": self.num_heads,
            "num_global_heads": self.num_global_heads,
            "mode": self.lfish_mode,
            "widths": self.mixing.widths,
            "noise": self.noise_kind != "none",
        }
        return Cost(
            paper_flops=linear_fish_flops(**sizes, bias=self.mixing.last_bias is not None),
            macs=linear_fish_macs(**sizes),
            num_parameters=sum(p.numel() for p in self.parameters()),
        )

    def extra_repr(self) -> str:
        """Sizes and switches, for printing."""
        return (
            f"{super().extra_repr()}, num_global_heads={self.num_global_heads}, "
            f"lfish_mode={self.lfish_mode!r}, noise={self.noise_kind!r}"
        )
