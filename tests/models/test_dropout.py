"""Dropout of activations, beside PyTorch's."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from lit_probattn.randomness import Dropout

COUNT = 400_003  # not a multiple of the numbers in a word


def _ones(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.ones(COUNT, dtype=dtype)


@pytest.mark.parametrize("p", [1e-4, 0.1, 0.5, 0.9])
def test_elements_are_dropped_with_their_probability_and_the_mean_stays(p: float) -> None:
    torch.manual_seed(0)
    out = Dropout(p)(_ones())
    spread = (p * (1 - p) / COUNT) ** 0.5
    assert float((out == 0).double().mean()) == pytest.approx(p, abs=5 * spread)
    rounded = round(p * 2**16) / 2**16
    torch.testing.assert_close(out.unique(), torch.tensor([0.0, 1 / (1 - rounded)]).double())


def test_numbers_of_a_word_and_of_neighbours_are_independent() -> None:
    torch.manual_seed(0)
    kept = (Dropout(0.5)(_ones()) > 0).double() * 2 - 1
    for lag in (1, 2, 3, 4, 8):
        assert abs(float((kept[:-lag] * kept[lag:]).mean())) < 5 / COUNT**0.5


@pytest.mark.parametrize("p", [0.0, 1.0, 1e-9, 1 - 1e-9])
def test_edges_are_those_of_pytorch(p: float) -> None:
    x = torch.randn(1000)
    torch.manual_seed(3)
    ours = Dropout(p)(x)
    torch.manual_seed(3)
    torch.testing.assert_close(ours, nn.Dropout(p)(x), atol=1e-6, rtol=0)


@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (2, 3, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_shape_dtype_and_gradient(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    x = (torch.rand(shape, dtype=torch.float64) + 1).to(dtype).requires_grad_()
    out = Dropout(0.4)(x)
    assert (out.shape, out.dtype) == (x.shape, dtype)
    out.sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad * x.detach(), out.detach())


def test_evaluation_returns_the_input() -> None:
    x = torch.randn(5)
    assert Dropout(0.5).eval()(x) is x


def test_a_checkpoint_drops_the_same_elements_again() -> None:
    torch.manual_seed(5)
    layer, x = Dropout(0.5), torch.ones(64, requires_grad=True)
    out = checkpoint(lambda x: layer(x) * x, x, use_reentrant=False)
    out.sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, 2 * out.detach())


def test_graphs_transforms_and_subclasses_use_pytorchs() -> None:
    class Own(Tensor):
        pass

    layer = Dropout(0.5)
    traced = torch.fx.experimental.proxy_tensor.make_fx(layer)(torch.ones(8))
    assert "random_" not in traced.code
    assert "bernoulli" in traced.code
    exported = torch.export.export(copy.deepcopy(layer).train(), (torch.ones(8),))
    assert "aten.dropout" in str(exported.graph)
    rows = torch.func.vmap(layer, randomness="different")(torch.ones(50, 64))
    assert len({tuple(row) for row in rows.tolist()}) > 40
    torch.manual_seed(2)
    ours = layer(torch.ones(64).as_subclass(Own))
    torch.manual_seed(2)
    assert type(ours) is Own
    assert torch.equal(ours, nn.Dropout(0.5)(torch.ones(64)))


def test_fake_tensors_outside_of_their_mode() -> None:
    x = FakeTensorMode().from_tensor(torch.ones(3, 4))
    assert Dropout(0.5)(x).shape == (3, 4)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_use_pytorchs(layout: torch.layout) -> None:
    x = torch.nested.nested_tensor([torch.ones(3, 4), torch.ones(2, 4)], layout=layout)
    out = Dropout(0.5)(x)
    assert out.is_nested
    assert {0.0, 2.0} == set(out.values().unique().tolist())
