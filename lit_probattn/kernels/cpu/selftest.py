"""Self-test of the C library against torch, once per process."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import lru_cache
from itertools import product
from typing import Any

import torch
from torch import Tensor

from lit_probattn.base.errors import UnsupportedError
from lit_probattn.base.memory import is_predicting
from lit_probattn.base.torch_internals import constant_in_graphs, outside_modes
from lit_probattn.kernels.cpu import draws, linear, tiles
from lit_probattn.kernels.cpu.library import load, obstacle, processor
from lit_probattn.randomness import AttentionDropout, RandomKey, normal_noise

logger = logging.getLogger("lit_probattn")

# Largest errors of weights and gradients; typical errors are 1e-15, 1e-7 and 5e-3.
_ERRORS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.03}
# Reductions of tiles, and components that share keys, which take one exponential.
_FORMS = (*tiles.KINDS, "shifted keys")


def _key() -> RandomKey:
    # Created here, because this module may be imported under fake tensors.
    return RandomKey(7, 3, torch.tensor([5, 2**31 + 9], device="cpu")).fold(1)


@constant_in_graphs
def refusal() -> str | None:
    """Return why the library is unsupported ("cannot …"), or None.

    While memory is predicted, it is neither compiled nor tested.
    """
    return obstacle() if is_predicting() else failure()


@lru_cache(maxsize=1)
def failure() -> str | None:
    """Return why the library is unsupported ("cannot …"), or None; warns once."""
    reason: str | None = None
    try:
        load()
        with torch.inference_mode(False), torch.enable_grad(), outside_modes():
            wrong = next((name for name, right in _checks() if not right), None)
        if wrong is not None:
            reason = f"cannot be trusted: its self-test of {wrong} failed"
    except UnsupportedError as error:
        reason = str(error)
    if reason is not None:
        logger.warning("the C library for CPUs %s; using torch operations instead", reason)
    return reason


@lru_cache(maxsize=1)
def draws_noise() -> bool:
    """Whether the library's noise has the bits of `randomness.normal_noise` on this machine."""
    if failure() is not None:
        return False
    blocks = ((3, range(2, 9), range(5, 140)), (8, range(3), range(70)))
    cpu = torch.device("cpu")
    with outside_modes():
        return all(
            torch.equal(
                draws.normal_noise(_key(), 2, maps, row, col),
                normal_noise(_key(), 2, maps, row, col, cpu),
            )
            for maps, row, col in blocks
        )


@constant_in_graphs
def multiplies_low() -> bool:
    """Whether the library supports bfloat16 heads; a prediction checks only the processor."""
    if is_predicting():
        found = processor()
        return "amx_bf16" in found or ("avx512_bf16" in found and "Intel" not in found)
    return failure() is None and load().low_products > 0


@constant_in_graphs
def can_draw_noise() -> bool:
    """Whether the library draws noise in this call: like `draws_noise`, also in predictions."""
    return is_predicting() or draws_noise()


def _checks() -> Iterator[tuple[str, bool]]:
    """Yield names of checks, and whether the library passes them."""
    dropout = AttentionDropout(0.3, _key())
    row, col = range(4, 9), range(3, 600)
    expected = dropout.keep(2, 3, row, col, torch.device("cpu"))
    yield "dropout", torch.equal(draws.keep(dropout, 2, 3, row, col), expected)
    for (dtype, largest), form in product(_ERRORS.items(), _FORMS):
        if dtype != torch.bfloat16 or load().low_products:
            yield f"tiles, {form}, {dtype}", _tiles_error(form, dtype) < largest
    for dtype, is_causal in product((torch.float64, torch.float32), (False, True)):
        name = f"linear attention{', causal' if is_causal else ''}, {dtype}"
        yield name, _linear_error(is_causal, dtype) < _ERRORS[dtype]


def _linear_error(is_causal: bool, dtype: torch.dtype) -> float:
    """Return the largest error of linear attention of mixtures, and of its gradients."""
    generator = torch.Generator().manual_seed(0)
    batch, sources, groups, length, size = 2, 2, 2, 60, 9
    shapes = [(batch, sources * groups, length, size), (batch, sources, 2, length, size)]
    shapes += [(batch, sources, length, 7), (sources, 2, 1)]
    like: dict[str, Any] = {"device": "cpu", "dtype": dtype}
    given = [torch.randn(shape, generator=generator, **like) for shape in shapes]
    given[3] = given[3].abs()
    query, key, value, prior = (x.requires_grad_() for x in given)
    row_map, col_map = (linear.MAPS.index(name) for name in ("elu", "relu"))
    call = linear.LinearInputs(
        *(query, key, value, prior, None, None, row_map, col_map, True, is_causal, 1e-3, 0.5)
    )
    out = linear.linear_by_chunks(call)
    exact = [x.detach().double().requires_grad_() for x in given]
    rows = torch.where(exact[0] > 0, exact[0] + 1.0, exact[0].exp())
    cols = (exact[1].relu() * exact[3][..., None]).sum(2).repeat_interleave(groups, 1)
    kernel = rows @ cols.mT
    kernel = kernel.tril() if is_causal else kernel
    numerator = kernel @ exact[2].repeat_interleave(groups, 1)
    expected = 0.5 * numerator / (kernel.sum(-1, keepdim=True) + 1e-3)
    weight = torch.linspace(-1.0, 1.0, out.numel(), device="cpu").view(out.shape)
    found = torch.autograd.grad((out * weight).sum(), given)
    wanted = torch.autograd.grad((expected * weight).sum(), exact)
    return _largest_error([(out, expected), *zip(found, wanted, strict=True)])


def _largest_error(pairs: list[tuple[Tensor, Tensor]]) -> float:
    """Return the largest norm of a difference relative to the second tensor; NaN if one is NaN."""
    errors = [(a - b).detach().norm() / b.detach().norm() for a, b in pairs]
    return float(torch.stack(errors).max())


def _tiles_error(form: str, dtype: torch.dtype) -> float:
    """Return the largest error of attention by tiles with two maps, and of its gradients."""
    generator = torch.Generator().manual_seed(_FORMS.index(form))
    precise = torch.float32 if dtype == torch.bfloat16 else dtype

    def draw(*shape: int) -> Tensor:
        drawn = torch.randn(shape, generator=generator, device="cpu", dtype=precise)
        return drawn.requires_grad_()

    heads, rows, cols, size, common = 3, 50, 130, 5, form in ("sum", "layers")
    maps_of_keys = 1 if form in ("power", "shifted keys") else 2
    names = dict.fromkeys(tiles.Inputs._fields)
    given: dict[str, Any] = {
        "query": draw(1, 2 if common else heads, rows, size),
        "key": draw(1, 1 if common else heads, maps_of_keys, cols, size),
        "value": draw(1, heads, cols, size),
    }
    if form == "layers":
        given |= {"first": draw(4, 2), "first_bias": draw(4), "second": draw(heads, 4)}
    elif form == "shifted keys":
        given |= {"row": draw(1, heads, rows, 2), "col": draw(1, heads, 2, cols)}
    elif form != "power":
        given["coef"] = draw(heads, 2)
    switches: dict[str, Any] = {
        "kind": tiles.KINDS.index("soft" if form == "shifted keys" else form),
        "heads": heads,
        "components": 1 if form in ("layers", "power") else 2,
        "unit_noise": False,
        "degree": 4,
    }
    switches |= {"is_causal": True, "threshold": 0, "first_row": 0, "scale": 0.5}
    given |= {n: given[n].detach().to(dtype).requires_grad_() for n in ("query", "key", "value")}
    exact = {name: x.detach().double().requires_grad_() for name, x in given.items()}
    query, key = exact["query"], exact["key"]
    maps = 0.5 * (query @ key[:, 0].mT if common else query[:, :, None] @ key.mT)
    if "first" in exact:
        units = torch.einsum("ug,bgnl->bunl", exact["first"], maps)
        units = (units + exact["first_bias"][:, None, None]).relu()
        scores = torch.einsum("hu,bunl->bhnl", exact["second"], units)
    elif form == "power":
        scores = 2 * torch.log(maps[:, :, 0].square() + 1e-12)
    elif common:
        scores = torch.einsum("hg,bgnl->bhnl", exact["coef"], maps)
    else:
        if form == "shifted keys":
            parts = maps + exact["row"].mT[..., None] + exact["col"][:, :, :, None]
        else:
            parts = maps * exact["coef"][:, :, None, None]
        scores = parts.amax(2) if form == "hard" else parts.logsumexp(2)
    hidden = torch.ones(rows, cols, dtype=torch.bool, device="cpu").triu(cols - rows + 1)
    expected = scores.masked_fill(hidden, float("-inf")).softmax(-1) @ exact["value"]
    out = tiles.attend(tiles.Inputs(**{**names, **given, **switches}))
    weight = torch.linspace(-1.0, 1.0, out.numel(), device="cpu").view(out.shape).to(dtype)
    found = torch.autograd.grad((out * weight).sum(), list(given.values()))
    wanted = torch.autograd.grad((expected * weight).sum(), list(exact.values()))
    return _largest_error([(out, expected), *zip(found, wanted, strict=True)])
