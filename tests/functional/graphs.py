"""Forms that record a layer as a graph, and the error of the graph.

The error is against the layer itself, in units of the output's root mean square, the larger of two
inputs.
"""

from __future__ import annotations

import contextlib
import io
import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import lit_probattn
from lit_probattn.configs import attention_entry, class_of, file_named, parameters_of

SIZES = (32, 512, 1100)
BATCH, WIDTH = 2, 32
# Largest size of cells that were stopped at 1100 after 100 s. Their graphs grow with N², because
# blocks of queries get shorter as rows get longer: α-entmax writes 50 bisections down for each of
# 367 blocks, and ONNX translates node by node.
LARGEST = {("export", "ast"): 512}
LARGEST |= {("onnx", name): 512 for name in ("ast", "mgk_hard_e", "smgk_hard_e")}
PUBLIC = tuple(name for name in lit_probattn.list_attention() if "/" not in name)
PRESETS = tuple(name for name in lit_probattn.list_attention() if "/" in name)

Layer = Callable[[Tensor], Tensor]


def bound(name: str, size: int) -> float:
    """Return the bound on a cell.

    An output comes from sums of WIDTH terms (projections) and of N (row sums, values). Added up in
    another order a sum of n terms moves by about eps · √n / 2 of its root mean square; both sums
    together by eps · √(N + 2 WIDTH) / 2, and the largest of 10⁵ entries lies 5 standard deviations
    out. Twice that, because the exponential hands on the errors of scores too. Hidden units
    of GFiSH have a ReLU between two more sums: where rounding moves one over its kink, the
    value is still continuous with slope at most 1, so that the errors of these sums count once
    more, and no jump does.
    """
    found = 5.0 * torch.finfo(torch.float32).eps * math.sqrt(size + 2 * WIDTH)
    return 2.0 * found if "gfish" in name else found


def layer_of(name: str, **options: Any) -> nn.Module:
    """Return the layer of a configuration, in evaluation, with room for every size."""
    torch.manual_seed(3)
    entry = attention_entry(file_named("attention", name))
    known = parameters_of(class_of(entry["class_path"]))
    given = {**{key: known[key].default for key in known}, **entry.get("init_args", {}), **options}
    if given.get("prior_share") == "head_position":
        options.setdefault("max_positions", 2 * max(SIZES))
    if given.get("denominator") == "sqrt_len":
        options.setdefault("padded_len", max(SIZES))
    return lit_probattn.create(name, WIDTH, head_dim=8, **options).eval()


def inputs(size: int, seed: int) -> Tensor:
    """Return one batch."""
    return torch.randn(BATCH, size, WIDTH, generator=torch.Generator().manual_seed(seed))


def export(layer: nn.Module, size: int) -> Layer:
    """torch.export, for one number of positions."""
    return torch.export.export(layer, (inputs(size, 0),)).module()


def export_dynamic(layer: nn.Module, size: int) -> Layer:
    """torch.export for any number of positions, recorded at another one."""
    positions = torch.export.Dim("positions", min=2, max=max(SIZES))
    shapes = {"query": {1: positions}}
    return torch.export.export(layer, (inputs(48, 0),), dynamic_shapes=shapes).module()


def compile_whole(layer: nn.Module, size: int, backend: str = "aot_eager") -> Layer:
    """torch.compile as one graph."""
    torch.compiler.reset()
    return torch.compile(layer, fullgraph=True, backend=backend)


def onnx(layer: nn.Module, size: int) -> Layer:
    """ONNX, run by onnxruntime."""
    import onnxruntime

    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(layer, (inputs(size, 0),), dynamo=True, verbose=False)
    assert program is not None
    session = onnxruntime.InferenceSession(program.model_proto.SerializeToString())
    (name,) = (given.name for given in session.get_inputs())
    return lambda x: torch.from_numpy(session.run(None, {name: x.numpy()})[0])


FORMS: dict[str, Callable[[nn.Module, int], Layer]] = {
    "export": export,
    "export_dynamic": export_dynamic,
    "compile": compile_whole,
    "onnx": onnx,
}


def error(form: str, name: str, size: int) -> float:
    """Return the error of one cell."""
    layer = layer_of(name)
    with torch.no_grad():
        graph = FORMS[form](layer, size)
        return max(_distance(graph, layer, inputs(size, seed)) for seed in (1, 2))


def _distance(graph: Layer, layer: Layer, x: Tensor) -> float:
    expected = layer(x)
    return float((graph(x) - expected).abs().max() / expected.square().mean().sqrt())
