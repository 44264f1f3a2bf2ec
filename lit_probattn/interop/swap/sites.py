"""Where a model computes softmax(Q Kᵀ) V: found by one run of an example, never by names."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks

from lit_probattn.attention.call import HeadLayout
from lit_probattn.attention.core import Core
from lit_probattn.base.torch_internals import outside_functions
from lit_probattn.interop.swap import interface
from lit_probattn.interop.swap.cores import heads_of
from lit_probattn.interop.swap.taking import SDPA, Seeing, as_heads, heads_and_masks
from lit_probattn.interop.swap.written import SOFTMAX, Products

# How a model hands over its heads: to transformers' attention interface, to PyTorch's function, or
# not at all, as it takes the softmax of its products itself.
Way = Literal["interface", "function", "written"]
# Modules that are a part of a computation, and own none.
_PARTS = ("torch.nn.modules.activation", "torch.nn.modules.dropout", "torch.nn.modules.linear")


@dataclass
class Site:
    """A call of attention.

    Args:
        name: of the module whose forward makes the call; empty for the whole model.
        module: it.
        index: of the call among those of one forward.
        way: how the heads are handed over.
        layout: the host's heads.
        is_cross: whether queries attend to another sequence.
        where: file and line of the call.
        refusal: why it cannot be swapped; empty if it can.
        inputs: heads, masks and scale of the call, where it was seen.
        output: what the host made of them, (B, H, N, E_v).
    """

    name: str
    module: nn.Module
    index: int
    way: Way
    layout: HeadLayout
    is_cross: bool
    where: str = ""
    refusal: str = ""
    inputs: dict[str, Any] = field(default_factory=dict)
    output: Tensor | None = None


class Recorder(Seeing):
    """Notes every call of attention while a model runs.

    Args:
        model: the model.
        only: a site, by name and index, of which one head's output is kept and the others are zero.
    """

    def __init__(self, model: nn.Module, only: tuple[str, int, int] | None = None) -> None:
        super().__init__()
        self.names = {id(m): name for name, m in model.named_modules()}
        self.only = only
        self.stack: list[nn.Module] = []
        self.calls: dict[int, int] = {}
        self.sites: dict[tuple[str, int], Site] = {}
        self.written: dict[str, str] = {}  # softmaxes that cannot be followed, by module
        self.products: dict[int, Products] = {}

    # ---- modules
    def enter(self, module: nn.Module, *_: Any) -> None:
        """Begin a forward of a module."""
        self.stack.append(module)
        self.calls[id(module)] = 0

    def leave(self, *_: Any) -> None:
        """End it."""
        self.products.pop(id(self.stack.pop()), None)

    @property
    def is_ours(self) -> bool:
        """Whether a core of ours is at work."""
        return any(isinstance(m, Core) for m in self.stack)

    def owner(self) -> nn.Module | None:
        """Return the innermost module of the model that is more than a part of torch."""
        for module in reversed(self.stack):
            is_part = type(module).__module__ in _PARTS
            if id(module) in self.names and (
                not is_part or isinstance(module, nn.MultiheadAttention)
            ):
                return module
        return None

    # ---- calls
    def take(self, *args: Any, **kwargs: Any) -> Tensor:
        """Note a call of PyTorch's function."""
        out = SDPA(*args, **kwargs)
        owner = self.owner()
        if owner is None or self.is_ours:
            return out
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        query, key, value = (given[name] for name in names[:3])
        mask, is_causal = given.get("attn_mask"), bool(given.get("is_causal"))
        heads, masks = heads_and_masks(query, key, value, mask, is_causal)
        inputs = {**masks, "scale": given.get("scale")}
        return self.note(owner, "function", heads, inputs, out, axis=-3)

    def interface(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Note a call of transformers' interface, in the place of our function there."""
        swapped = interface.core_of(module) is not None or id(module) not in self.names
        function = interface.attention_function if swapped else interface.as_the_library
        with outside_functions():  # it calls PyTorch's, which is no site of its own
            given = {name: value for name, value in kwargs.items() if value is not None}
            out, weights = function(module, query, key, value, attention_mask, **given)
        if swapped:
            return out, weights
        causal = kwargs.get("is_causal")
        causal = getattr(module, "is_causal", True) if causal is None else causal
        inputs = {
            "mask": attention_mask,
            "bias": kwargs.get("position_bias"),
            "is_causal": bool(causal) and attention_mask is None and query.shape[2] > 1,
            "scale": kwargs.get("scaling"),
        }
        lost = [reason for name, reason in interface.LOST.items() if kwargs.get(name) is not None]
        refusal = lost[0] if lost else ""
        heads = (query, key, value)
        out = self.note(module, "interface", heads, inputs, out, axis=2, refusal=refusal)
        return out, weights

    def other(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Follow products to their softmax."""
        out = func(*args, **kwargs)
        owner = self.owner()
        if owner is None or self.is_ours:
            return out
        products = self.products.setdefault(id(owner), Products())
        if func in SOFTMAX and args[0].dim() > 2:
            heads = products.heads(args[0])
            if heads is not None:
                query, key, _ = heads
                self.note(owner, "written", (query, key, key), {}, None)
            elif args[0].dim() == 4:
                self.written.setdefault(self.names[id(owner)], caller())
        else:
            products.follow(func, args, kwargs, out)
        return out

    def note(
        self,
        owner: nn.Module,
        way: Way,
        heads: tuple[Tensor, Tensor, Tensor],
        inputs: dict[str, Any],
        out: Tensor | None,
        *,
        axis: int = 0,
        refusal: str = "",
    ) -> Any:
        """Note a call; return its output, or that of one head."""
        query, key, value = heads
        layout = HeadLayout(
            *(query.shape[1], key.shape[1], value.shape[1], query.shape[1]),
            *(query.shape[-1], value.shape[-1]),
        )
        index, name = self.calls.get(id(owner), 0), self.names[id(owner)]
        self.calls[id(owner)] = index + 1
        known = self.sites.get((name, index))
        if known is None:
            inputs = {"query": query, "key": key, "value": value, **inputs}
            is_cross, where = query.shape[2] != key.shape[2], caller()
            site = Site(name, owner, index, way, layout, is_cross, where, refusal, inputs)
            if out is not None:
                site.output = as_heads(out.transpose(1, 2) if axis == 2 else out)
            site.refusal = refusal or self.first_refusal(site)
            self.sites[name, index] = site
        elif known.layout != layout:
            known.refusal = (
                f"its heads differ from call to call: {heads_of(known.layout)}, then "
                f"{heads_of(layout)}"
            )
        if self.only is not None and out is not None and self.only[:2] == (name, index):
            kept = torch.zeros_like(out)
            kept.select(axis, self.only[2]).fill_(1.0)
            return out * kept
        return out

    def first_refusal(self, site: Site) -> str:
        """Say why a call cannot be swapped, or nothing."""
        if site.way == "interface" and site.index > 0:
            return "it calls transformers' attention several times in one forward"
        if in_checkpoint(site.module):
            return (
                "its forward attends inside of a checkpoint, which would attend as before the swap "
                "when it is repeated: put the whole layer into the checkpoint"
            )
        return misused_axes(site)


def misused_axes(site: Site) -> str:
    """Say what is wrong with the axes of a call, by the rows of weights that make its queries.

    All entries of a query come from as many rows as there are entries. If one row makes them, they
    are tokens, and channels attend to channels. If several entries of what should be the batch come
    from rows of their own, they are heads.
    """
    query = site.inputs["query"]
    weights = [p for p in site.module.parameters() if p.dim() > 1 and p.requires_grad]
    if not query.requires_grad or not weights or query.shape[-1] == 1:
        return ""

    def rows(sample: int) -> list[Tensor]:
        """Which rows of each weight make the first query of a sample, in the first head."""
        part = query[sample, 0, 0]
        target = (part * torch.linspace(1.0, 2.0, part.numel()).to(part)).sum()
        found = torch.autograd.grad(
            target, weights, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        return [g.flatten(1).abs().amax(1) > 0 for g in found]

    with outside_functions():
        first, size = rows(0), query.shape[-1]
        touched = [int(made.sum()) for made in first]
        if max(touched) == 1:
            return (
                "channels attend to channels there: the entries of its queries are tokens, whose "
                "number differs from input to input"
            )
        whole = [i for i, made in enumerate(first) if touched[i] == size < len(made)]
        others = {1, len(query) - 1} - {0} if query.shape[1] == 1 and whole else set()
        for sample in others & set(range(len(query))):
            second = rows(sample)
            if not any(bool((first[i] & second[i]).any()) for i in whole):
                shape = (*query.shape[:1], *query.shape[2:])
                return (
                    f"it puts heads into the batch, {shape}: all heads would share the parameters "
                    "of one"
                )
    return ""


def caller() -> str:
    """Return file and line of the code of the model that is at work."""
    frame: Any = inspect.currentframe()
    ours, torchs = str(Path(__file__).parent), str(Path(torch.__file__).parent)
    while frame.f_back is not None and frame.f_code.co_filename.startswith((ours, torchs)):
        frame = frame.f_back
    path = Path(frame.f_code.co_filename)
    return f"{path.parent.name}/{path.name}:{frame.f_lineno}"


def in_checkpoint(owner: nn.Module) -> bool:
    """Whether a checkpoint stands between a module's forward and the present call."""
    frame: Any = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_filename.endswith("torch/utils/checkpoint.py"):
            return True
        if frame.f_code.co_name == "_call_impl" and frame.f_locals.get("self") is owner:
            return False
        frame = frame.f_back
    return False


@contextmanager
def recording(model: nn.Module, only: tuple[str, int, int] | None = None) -> Iterator[Recorder]:
    """Record what a model does, in evaluation; its modes and what needs gradients come back."""
    found = Recorder(model, only)
    modes = [(m, m.training) for m in model.modules()]
    frozen = [
        p for p in model.parameters()
        if not p.requires_grad and p.is_floating_point() and not p.is_inference()
    ]  # fmt: skip
    with ExitStack() as stack:
        for module, mode in modes:
            stack.callback(setattr, module, "training", mode)
            module.training = False
        for parameter in frozen:
            stack.callback(parameter.requires_grad_, False)
            parameter.requires_grad_(True)
        stack.callback(torch.set_rng_state, torch.get_rng_state())
        before = module_hooks.register_module_forward_pre_hook(found.enter)
        stack.callback(before.remove)
        after = module_hooks.register_module_forward_hook(found.leave, always_call=True)
        stack.callback(after.remove)
        stack.enter_context(interface.replaced(found.interface))
        if "torch._dynamo" in sys.modules:  # otherwise nothing is compiled
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(found)
        yield found
