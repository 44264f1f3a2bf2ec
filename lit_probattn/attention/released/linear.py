"""Linear attention and MLK as in the released codes of MGK.

`configs/attention/as_released/` names these classes; no module imports them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import torch
from torch import Tensor

from lit_probattn.attention.call import HeadCall
from lit_probattn.attention.linear.functions import Denominator, LinearForm, Mix, OutputScale
from lit_probattn.attention.linear.layer import (
    LinearArguments,
    LinearAttention,
    LinearOptions,
)
from lit_probattn.attention.linear.mlk import MLKArguments, MLKAttention, MLKCore, MLKOptions
from lit_probattn.base.arguments import Count, OnlyWith, Positive, Rate, by_name


@dataclass(frozen=True, kw_only=True)
class ReleasedSwitches(LinearOptions):
    """Fields of `LinearForm` that only the released codes of MGK, ICML 2022, set.

    Args:
        denominator: `sum` over keys, or `sqrt_len` (divide by √N, Long Range Arena).
        eps: added to the sum.
        output_scale: factor on the output, `one` or `inv_sqrt_head_dim` (language model).
        padded_len: N of `sqrt_len`; None means the length of the call. Required for decoding, and
            if batches are padded to different lengths.
    """

    denominator: Denominator = "sum"
    eps: Annotated[Rate, OnlyWith(denominator="sum")] = 0.0
    output_scale: OutputScale = "one"
    padded_len: Annotated[Count | None, OnlyWith(denominator="sqrt_len")] = None

    def form(self) -> LinearForm:
        """Return feature map and options."""
        return replace(
            super().form(),
            denominator=self.denominator,
            eps=self.eps,
            output_scale=self.output_scale,
            padded_len=self.padded_len,
        )


@dataclass(frozen=True)
class ReleasedLinearArguments(ReleasedSwitches, LinearArguments):
    """Arguments of `ReleasedLinearAttention`."""


class ReleasedLinearAttention(LinearAttention):
    """`LinearAttention` with the options of the released codes of MGK, ICML 2022.

    Source: released code of MGK: Long Range Arena and language model.
    Departs from the source: nothing; `LinearAttention` follows the paper.

    The arguments are the fields of `ReleasedSwitches` and the arguments of `LinearAttention`.

    Raises:
        ValueError: an unknown name, or options that contradict each other; see also
            `LinearAttention`.
    """

    @by_name(ReleasedLinearArguments)
    def __init__(self, options: ReleasedLinearArguments) -> None:
        self.build(options)


@dataclass(frozen=True, kw_only=True)
class ReleasedMLKOptions(ReleasedSwitches, MLKOptions):
    """Options that only the released codes of MLK have.

    Args:
        mix: `after` the feature map (the paper), or `before` it, φ(Σ_r π_r key[j, r]), which is
            ordinary linear attention with key weights Σ_r π_r W_r (Long Range Arena).
        shift_first_zero: initialise the first shift with zero.
        second_scale: factor on φ of the second component of two (`scale_w` of the language model's
            layers, which no command line sets).

    Raises:
        ValueError: `second_scale` without two components that are mixed after the feature map.
    """

    mix: Mix = "after"
    shift_first_zero: Annotated[bool, OnlyWith(shifted_keys=True)] = False
    second_scale: Positive = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        components = self.num_components
        if self.second_scale != 1.0 and (components != 2 or self.mix != "after"):
            raise ValueError(
                f"second_scale={self.second_scale} needs num_components=2 and mix=after, received "
                f"{components} and {self.mix}"
            )

    def form(self) -> LinearForm:
        """Return feature map and options, including the order of mixing."""
        return replace(super().form(), mix=self.mix)


@dataclass(frozen=True, kw_only=True)
class ReleasedMLKArguments(ReleasedMLKOptions, MLKArguments):
    """Arguments of `ReleasedMLKAttention`."""


class ReleasedMLKCore(MLKCore):
    """`MLKCore` with a factor on the features of the second component."""

    options_class = ReleasedMLKOptions

    def make_parameters(self, options: LinearOptions) -> None:
        """Create priors and shifts; the first shift is zero if `shift_first_zero`."""
        super().make_parameters(options)
        assert isinstance(options, ReleasedMLKOptions)
        self.second_scale = options.second_scale
        if options.shift_first_zero and self.key_shift is not None:
            with torch.no_grad():
                self.key_shift[:, 0] = 0.0

    def shares(self, call: HeadCall) -> Tensor | None:
        """Return π of the call's keys times `second_scale`, (H_kv, K, 1 or L)."""
        shares = super().shares(call)
        if shares is None or self.second_scale == 1.0:
            return shares
        factor = shares.new_ones(shares.shape[1])
        factor[1] = self.second_scale
        return shares * factor[:, None]


class ReleasedMLKAttention(MLKAttention):
    """`MLKAttention` with the options of the released codes of MGK, ICML 2022.

    Source: released code of MGK: Long Range Arena and language model.
    Departs from the source: nothing; `MLKAttention` follows the paper.

    The arguments are the fields of `ReleasedMLKOptions` and the arguments of `MLKAttention`.

    Raises:
        ValueError: an unknown name, or options that contradict each other; see also
            `MLKAttention`.
    """

    core_class = ReleasedMLKCore

    @by_name(ReleasedMLKArguments)
    def __init__(self, options: ReleasedMLKArguments) -> None:
        self.build(options)
