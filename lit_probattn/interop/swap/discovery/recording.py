"""Recording of a model's softmax(Q Kᵀ) V in one run of an example, independent of names."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks

from lit_probattn.attention.call import HeadLayout
from lit_probattn.attention.core import Core
from lit_probattn.base.errors import UnsupportedError
from lit_probattn.base.torch_internals import outside_functions
from lit_probattn.interop.swap import interface
from lit_probattn.interop.swap.classes import first_tokens
from lit_probattn.interop.swap.cores import heads_of
from lit_probattn.interop.swap.discovery.projections import find_makers, reader_in
from lit_probattn.interop.swap.discovery.sites import Rows, Site, Way
from lit_probattn.interop.swap.taking import SDPA, Seeing, as_heads, heads_and_masks
from lit_probattn.interop.swap.written import SOFTMAX, Products, in_order, over_keys

# Modules that are part of a computation and do not own attention.
_PARTS = ("torch.nn.modules.activation", "torch.nn.modules.dropout", "torch.nn.modules.linear")


class Recorder(Seeing):
    """Records every attention call of a running model.

    Args:
        model: the model.
        marks: whether every element of head h is replaced by h + 1; the products that read these
            are recorded.
    """

    def __init__(self, model: nn.Module, marks: bool = False) -> None:
        super().__init__()
        self.names = {id(m): name for name, m in model.named_modules()}
        self.parameters = {id(p): name for name, p in model.named_parameters()}
        self.marks = marks
        self.stack: list[nn.Module] = []
        self.calls: dict[int, int] = {}
        self.sites: dict[tuple[str, int], Site] = {}
        self.written: dict[str, str] = {}  # softmaxes that are not over keys, by module
        self.products: dict[int, Products] = {}
        self.last: Site | None = None
        self.readers: dict[tuple[str, int], dict[Rows, nn.Module]] = {}

    # ---- modules
    def enter(self, module: nn.Module, *_: Any) -> None:
        """Start a forward of a module."""
        self.stack.append(module)
        self.calls[id(module)] = 0

    def leave(self, *_: Any) -> None:
        """End a forward of a module."""
        self.products.pop(id(self.stack.pop()), None)

    @property
    def is_ours(self) -> bool:
        """Whether a core of this package is running."""
        return any(isinstance(m, Core) for m in self.stack)

    def owner(self) -> nn.Module | None:
        """Return the innermost module of the model, other than elementary modules of torch."""
        for module in reversed(self.stack):
            is_part = type(module).__module__ in _PARTS
            if id(module) in self.names and (
                not is_part or isinstance(module, nn.MultiheadAttention)
            ):
                return module
        return None

    # ---- calls
    def take(self, *args: Any, **kwargs: Any) -> Tensor:
        """Record a call of PyTorch's function."""
        owner = self.owner()
        if owner is None or self.is_ours:
            return SDPA(*args, **kwargs)
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        query, key, value = (given[name] for name in names[:3])
        mask, is_causal = given.get("attn_mask"), bool(given.get("is_causal"))
        if self.marks:
            mask, is_causal = None, False
        heads, masks = heads_and_masks(query, key, value, mask, is_causal)
        inputs = {**masks, "scale": given.get("scale")}
        out = self.marked(query, value) if self.marks else SDPA(*args, **kwargs)
        self.note(owner, "function", heads, inputs, as_heads(out))
        return out

    def interface(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Record a call of transformers' interface, instead of `attention_function`."""
        swapped = interface.cores_of(module) is not None or id(module) not in self.names
        function = interface.attention_function if swapped else interface.as_the_library
        if self.marks and not swapped:
            out, weights = self.marked(query, value).transpose(1, 2), None
        else:
            with outside_functions():  # it calls PyTorch's function, which is not another site
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
        lost = interface.lost_argument(module, kwargs)
        heads = (query, key, value)
        self.note(module, "interface", heads, inputs, out.transpose(1, 2), lost)
        return out, weights

    def other(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Follow products to their softmax, and marks to their products."""
        owner = self.owner()
        if owner is None or self.is_ours:
            return func(*args, **kwargs)
        if self.marks:
            self.note_reader(func, args, kwargs)
        out = func(*args, **kwargs)
        products = self.products.setdefault(id(owner), Products())
        given = in_order(args, kwargs)
        if func in SOFTMAX and given[0].dim() > 2:
            heads = products.heads(given[0]) if over_keys(given, kwargs) else None
            if heads is not None:
                query, key, _ = heads
                site = self.note(owner, "written", (query, key, key), {}, None)
                products.maps.set(out, site)
            elif given[0].dim() == 4 or products.known.get(given[0]) is not None:
                self.written.setdefault(self.names[id(owner)], caller())
            return out
        site, value = products.values_of(func, args, kwargs)
        if site is None or value is None:
            products.follow(func, args, kwargs, out)
            return out
        lead, size = site.inputs["query"].shape[:2], value.shape[-1]
        value = value if value.dim() == 4 else value.reshape(*lead, *value.shape[-2:])
        if self.marks:
            out = self.marked(site.inputs["query"], value).reshape(out.shape)
        if self.sites.get((site.name, site.index)) is site:
            site.inputs["value"], site.output = value, out.reshape(*lead, *out.shape[-2:])
            site.layout = replace(site.layout, value=value.shape[1], value_head_dim=size)
        return out

    def marked(self, query: Tensor, value: Tensor) -> Tensor:
        """Return results in which every element of head h is h + 1."""
        shape = (*query.shape[:-1], value.shape[-1])
        heads = shape[-3] if len(shape) > 3 else 1
        marks = torch.arange(1, heads + 1, device=query.device, dtype=query.dtype)
        return marks.view(-1, 1, 1).expand(shape).contiguous()

    def note_reader(self, func: Any, args: Any, kwargs: Any) -> None:
        """Record the weight that multiplies the results of the last call."""
        if self.last is None:
            return
        rows = reader_in(func, args, kwargs, self.last, self.parameters)
        if rows is not None:
            key = self.last.name, self.last.index
            self.readers.setdefault(key, {})[rows] = self.stack[-1]

    def note(
        self,
        owner: nn.Module,
        way: Way,
        heads: tuple[Tensor, Tensor, Tensor],
        inputs: dict[str, Any],
        out: Tensor | None,
        refusal: str = "",
    ) -> Site:
        """Record a call, with heads and results (B, H, N, E); return it."""
        query, key, value = heads
        layout = HeadLayout(
            *(query.shape[1], key.shape[1], value.shape[1], query.shape[1]),
            *(query.shape[-1], value.shape[-1]),
        )
        index, name = self.calls.get(id(owner), 0), self.names[id(owner)]
        self.calls[id(owner)] = index + 1
        known = self.sites.get((name, index))
        inputs = {"query": query, "key": key, "value": value, **inputs}
        is_cross, where = query.shape[2] != key.shape[2], caller()
        site = Site(name, owner, index, way, layout, is_cross, where, refusal, inputs, out)
        if known is None:
            tokens = first_tokens(*_arguments_of(owner))
            if tokens is not None and tokens.shape[:2] == (query.shape[0], query.shape[2]):
                site.width = tokens.shape[-1]
            site.refusal = refusal or ("" if self.marks else self.first_refusal(site))
            self.sites[name, index] = site
        elif _sizes(known.layout, way) != _sizes(layout, way):
            known.refusal = (
                f"its heads differ between calls: {heads_of(known.layout)}, then {heads_of(layout)}"
            )
        self.last = site
        return site

    def first_refusal(self, site: Site) -> str:
        """Return why a call cannot be swapped, or an empty string."""
        if site.way == "interface" and site.index > 0:
            return "it calls transformers' attention more than once per forward"
        if in_checkpoint(site.module):
            return (
                "it attends inside a checkpoint within its forward, which would recompute the "
                "original attention: put the whole layer into the checkpoint"
            )
        return misused_axes(site)

    # ---- projections
    def find_makers(self) -> None:
        """Determine the weights that compute the heads of every call, or set its refusal."""
        for site in self.sites.values():
            if site.refusal:
                continue
            try:
                site.made = find_makers(site, self.parameters)
            except UnsupportedError as error:
                site.refusal = str(error)


def _sizes(layout: HeadLayout, way: Way) -> tuple[Any, ...]:
    """Return the sizes that must not change between calls; written-out values come later."""
    sizes = astuple(layout)
    return (*sizes[:2], layout.head_dim) if way == "written" else sizes


def misused_axes(site: Site) -> str:
    """Return the fault in the axes of a call, from the weight rows that compute its queries.

    Each dimension of a query comes from a separate row. If one row computes all dimensions, they
    are tokens, and channels attend to channels. If elements of the batch come from separate rows,
    they are heads.
    """
    query = site.inputs["query"]
    weights = [p for p in site.module.parameters() if p.dim() > 1 and p.requires_grad]
    if not query.requires_grad or not weights or query.shape[-1] == 1:
        return ""

    def rows(sample: int) -> list[Tensor]:
        """Rows of each weight that contribute to the first query of a sample, in the first head."""
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
            return "its attention is between channels: head_dim is the number of tokens"
        whole = [i for i, made in enumerate(first) if touched[i] == size < len(made)]
        others = {1, len(query) - 1} - {0} if query.shape[1] == 1 and whole else set()
        for sample in others & set(range(len(query))):
            second = rows(sample)
            if not any(bool((first[i] & second[i]).any()) for i in whole):
                shape = (*query.shape[:1], *query.shape[2:])
                return (
                    f"it puts heads into the batch, {shape}: all heads would share the parameters "
                    "of one head"
                )
    return ""


def caller() -> str:
    """Return file and line of the model's code that is running."""
    frame: Any = inspect.currentframe()
    ours, torchs = str(Path(__file__).parents[1]), str(Path(torch.__file__).parent)
    while frame.f_back is not None and frame.f_code.co_filename.startswith((ours, torchs)):
        frame = frame.f_back
    path = Path(frame.f_code.co_filename)
    return f"{path.parent.name}/{path.name}:{frame.f_lineno}"


def _arguments_of(owner: nn.Module) -> tuple[Any, Any]:
    frame: Any = inspect.currentframe()
    while frame is not None:
        local = frame.f_locals
        if frame.f_code.co_name == "_call_impl" and local.get("self") is owner:
            return local["args"], local["kwargs"]
        frame = frame.f_back
    return (), {}


def in_checkpoint(owner: nn.Module) -> bool:
    """Whether a checkpoint is between a module's forward and the current call."""
    frame: Any = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_filename.endswith("torch/utils/checkpoint.py"):
            return True
        if frame.f_code.co_name == "_call_impl" and frame.f_locals.get("self") is owner:
            return False
        frame = frame.f_back
    return False


@contextmanager
def recording(model: nn.Module, marks: bool = False) -> Iterator[Recorder]:
    """Record a run of a model in eval mode; restore modes and `requires_grad` afterwards."""
    found = Recorder(model, marks)
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
        if "torch._dynamo" in sys.modules:  # otherwise no code is compiled
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(found)
        yield found
