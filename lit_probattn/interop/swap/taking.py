"""Routing of `F.scaled_dot_product_attention` calls of a module to the module's cores.

A torch-function mode is active during the forward of the module that owns the call, so queries,
keys and values are intercepted however the function is called, also from `nn.MultiheadAttention`.
The module's weights, other operations on its heads, and its state dict are unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from lit_probattn.base.torch_internals import open_multi_head_attention, recomputation
from lit_probattn.interop.swap.classes import take_calls
from lit_probattn.interop.swap.cores import Cores, TensorMap, heads_of

SDPA, MULTI_HEAD = F.scaled_dot_product_attention, F.multi_head_attention_forward
# Arguments of MULTI_HEAD after the weights, if they are positional.
_AFTER_WEIGHTS = ("training", "key_padding_mask", "need_weights", "attn_mask")


class Seeing(TorchFunctionMode):
    """Intercepts every attention call, however it is made."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.unflatten:  # PyTorch 2.11 compiles only the function in a mode
            func = torch.unflatten
        if func is SDPA:
            return self.take(*args, **kwargs)
        if func is MULTI_HEAD:  # it would disable the mode and attend outside it
            return self.multi_head(args, kwargs)
        return self.other(func, args, kwargs)

    def take(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the result of an attention call."""
        return SDPA(query, key, value, *args, **kwargs)

    def multi_head(self, args: Any, kwargs: dict[str, Any]) -> Any:
        """Return the result of multi-head attention, whose inner call is intercepted."""
        kwargs = {**kwargs, **dict(zip(_AFTER_WEIGHTS, args[13:], strict=False))}
        with self:
            return open_multi_head_attention(*args[:13], **{**kwargs, "need_weights": False})

    def other(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of another function."""
        return func(*args, **kwargs)


class Attending(Seeing):
    """Routes the calls inside one forward of a module to its cores, in order.

    If keys have components that the host does not compute, all operations between the key weight
    and the call are repeated for each of them.

    Args:
        module: a module with `cores`.
    """

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module, self.count = module, 0
        self.needs_weights = False
        self.weights: Tensor | None = None
        self.around = None if torch.compiler.is_compiling() else recomputation()
        module.cores.check_weights(module)
        self.twins: TensorMap[list[Tensor]] = module.cores.twins(module)

    def other(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of another function, and record the results of further components."""
        out = func(*args, **kwargs)
        self.follow_components(func, args, kwargs, out)
        return out

    def follow_components(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Compute a function of keys also for further components."""
        if self.twins.entries and _holds(self.twins, (args, kwargs)):
            count = len(self.twins.entries[0][1])
            more = [func(*_twin(self.twins, args, t), **_twin(self.twins, kwargs, t))
                    for t in range(count)]  # fmt: skip
            if isinstance(out, Tensor):
                self.twins.set(out, more)
            elif isinstance(out, tuple | list):
                for place, part in enumerate(out):
                    if isinstance(part, Tensor):
                        self.twins.set(part, [other[place] for other in more])

    def components(self, key: Tensor, form: Callable[[Tensor], Tensor]) -> Tensor:
        """Return keys (B, H_kv·K, L, E) with the components of every head adjacent.

        Args:
            key: keys of the host.
            form: returns their heads, (B, H_kv, L, E).
        """
        more = self.twins.get(key)
        if more is None:
            return form(key)
        every = [form(k) for k in (key, *more)]
        return torch.stack(every, 2).flatten(1, 2)

    @property
    def kind(self) -> str:
        """Class name of the module."""
        return type(self.module).__name__

    def next_call(self) -> int:
        """Return the index of the next call.

        Raises:
            RuntimeError: it has no core, or a checkpoint would repeat the original call.
        """
        cores: Cores = self.module.cores
        if self.count >= len(cores):
            raise RuntimeError(
                f"{self.kind} attends {self.count + 1} times in one forward, expected "
                f"{len(cores)} as in the example"
            )
        if not torch.compiler.is_compiling() and recomputation() is not self.around:
            raise RuntimeError(
                f"{self.kind} attends inside a checkpoint within its forward, which would "
                "recompute the original attention: put the whole layer into the checkpoint"
            )
        self.count += 1
        return self.count - 1

    def finish(self) -> None:
        """Check that every core was called.

        Raises:
            RuntimeError: the forward attends less often than in the example.
        """
        if self.count != len(self.module.cores):
            raise RuntimeError(
                f"{self.kind} attended {self.count} times in one forward, expected "
                f"{len(self.module.cores)} as in the example"
            )

    def take(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Attend by a core; the arguments are the same as in `F.scaled_dot_product_attention`.

        Raises:
            RuntimeError: the call differs from the example.
        """
        index, cores = self.next_call(), self.module.cores
        heads, masks = heads_and_masks(query, key, value, attn_mask, is_causal)
        given, layout = heads[0].shape[1], cores.core(index).layout
        sharing = cores.sharing[index]
        keys = self.components(key, lambda k: as_heads(k)[:, :: sharing.repeats])
        groups, value_heads = sharing.groups, heads[2][:, :: sharing.repeats]
        allowed = {layout.query} | ({sum(map(len, groups))} if groups else set())
        if given not in allowed or layout.key * layout.keys_per_head % keys.shape[1]:
            raise RuntimeError(
                f"{self.kind} attends with {given} query and {heads[1].shape[1]} key heads, "
                f"expected {heads_of(layout)} as in the example"
            )
        options = {"dropout": dropout_p, "needs_weights": self.needs_weights, "scale": scale}
        out, self.weights = cores.attend(index, heads[0], keys, value_heads, **options, **masks)
        return out.reshape(*query.shape[:-1], value.shape[-1])

    def multi_head(self, args: Any, kwargs: dict[str, Any]) -> Any:
        """Return output and attention weights of multi-head attention."""
        kwargs = {**kwargs, **dict(zip(_AFTER_WEIGHTS, args[13:], strict=False))}
        self.needs_weights = kwargs.get("need_weights", True)
        out, _ = super().multi_head(args[:13], kwargs)
        weights, self.weights, self.needs_weights = self.weights, None, False
        if weights is not None:
            weights = weights.mean(1) if kwargs.get("average_attn_weights", True) else weights
            weights = weights if args[0].dim() == 3 else weights[0]
        return out, weights


def heads_and_masks(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool
) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]:
    """Return heads with four dimensions, and masks as arguments of `head_call`.

    Tensors without a head dimension, (B, N, E), get one of size 1; dimensions before the heads,
    such as windows, are merged into the batch.
    """
    if mask is not None and query.dim() != 4:
        mask = as_heads(mask.expand(*query.shape[:-1], key.shape[-2]))
    rows, cols = query.shape[-2], key.shape[-2]
    if is_causal and rows != cols:  # torch aligns at the first query and key
        mask, is_causal = query.new_ones(rows, cols, dtype=torch.bool).tril(), False
    heads = as_heads(query), as_heads(key), as_heads(value)
    return heads, {"mask": mask, "is_causal": is_causal}


def as_heads(x: Tensor) -> Tensor:
    """Return (B, H, N, E) of heads with fewer or more dimensions."""
    if x.dim() < 4:
        return x.reshape(-1, 1, *x.shape[-2:])
    return x.flatten(0, -4) if x.dim() > 4 else x


def _holds(twins: TensorMap[list[Tensor]], given: Any) -> bool:
    """Whether an argument of a function has further components."""
    if isinstance(given, Tensor):
        return twins.get(given) is not None
    if isinstance(given, dict):
        given = given.values()
    elif not isinstance(given, tuple | list):
        return False
    return any(_holds(twins, part) for part in given)


def _twin(twins: TensorMap[list[Tensor]], given: Any, place: int) -> Any:
    """Return arguments with a further component instead of the first."""
    if isinstance(given, Tensor):
        more = twins.get(given)
        return given if more is None else more[place]
    if isinstance(given, dict):
        return {name: _twin(twins, part, place) for name, part in given.items()}
    if type(given) in (tuple, list):
        return type(given)([_twin(twins, part, place) for part in given])
    return given


def no_fast_path(*_: Any) -> None:
    """Do nothing; this hook disables the fast path of `nn.TransformerEncoderLayer`."""


def give_cores(module: nn.Module, cores: Cores) -> None:
    """Assign cores to a module, and route its attention calls to them."""
    holder: Any = module
    holder.cores = cores
    take_calls(module)
    if isinstance(module, nn.MultiheadAttention):
        module.register_forward_pre_hook(no_fast_path)
