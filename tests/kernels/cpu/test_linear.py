"""Linear attention in C against its maps written out: features, masks, chunks, empty rows."""

from dataclasses import dataclass
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lit_probattn.attention import LinearAttention, MLKAttention
from lit_probattn.kernels.cpu import library, linear
from lit_probattn.kernels.cpu.linear import MAPS, LinearInputs, linear_by_chunks

pytestmark = pytest.mark.skipif(
    library.obstacle() is not None, reason=f"the C library {library.obstacle()}"
)
FEATURES = {"none": lambda x: x, "elu": lambda x: nn.functional.elu(x) + 1.0, "relu": torch.relu}


@dataclass
class Case:
    """Sizes and switches of a call; more than one component, or a prior, has shares."""

    batch: int = 2
    sources: int = 2
    groups: int = 1
    components: int = 1
    rows: int = 60
    cols: int = 60
    size: int = 5
    value_size: int = 7
    row_map: str = "elu"
    col_map: str = "elu"
    has_prior: bool = False
    prior_per_key: bool = False
    masked: bool = False
    dropped: bool = False
    divides: bool = True
    is_causal: bool = True
    dtype: torch.dtype = torch.float64

    def draw(self):
        """Return random inputs; features are positive, so that sums are not near zero."""

        def heads(*shape, positive=False):
            x = torch.randn(self.batch, *shape, dtype=self.dtype)
            return (x.abs() + 0.1 if positive else x).requires_grad_()

        query = heads(
            self.sources * self.groups, self.rows, self.size, positive=self.row_map == "none"
        )
        key = heads(
            self.sources, self.components, self.cols, self.size, positive=self.col_map == "none"
        )
        value = heads(self.sources, self.cols, self.value_size)
        prior = mask = keep = None
        if self.components > 1 or self.has_prior:
            shares = self.cols if self.prior_per_key else 1
            prior = torch.rand(self.sources, self.components, shares, dtype=self.dtype) + 0.1
            prior.requires_grad_()
        if self.masked:
            mask = torch.rand(self.batch, self.cols) > 0.3
        if self.dropped:
            keep = 1.5 * (torch.rand(self.batch, self.sources, self.cols) > 0.3).to(self.dtype)
        maps = MAPS.index(self.row_map), MAPS.index(self.col_map)
        inputs = (query, key, value, prior, mask, keep, *maps)
        return LinearInputs(*inputs, self.divides, self.is_causal, 1e-3, 0.7)


def written_out(call):
    """Return what `linear_by_chunks` does, of all pairs at once."""
    groups = call.query.shape[1] // call.key.shape[1]
    rows, parts = (
        FEATURES[MAPS[n]](x) for n, x in ((call.row_map, call.query), (call.col_map, call.key))
    )
    cols = parts[:, :, 0] if call.prior is None else (parts * call.prior[..., None]).sum(2)
    if call.key_mask is not None:
        cols = cols.masked_fill(~call.key_mask[:, None, :, None], 0.0)
    value = call.value if call.keep is None else call.value * call.keep[..., None]
    kernel = rows @ cols.repeat_interleave(groups, 1).mT
    kernel = kernel.tril() if call.is_causal else kernel
    numerator = call.factor * (kernel @ value.repeat_interleave(groups, 1))
    return numerator / (kernel.sum(-1, keepdim=True) + call.eps) if call.divides else numerator


def leaves(call):
    return [x for x in call[:4] if x is not None]


def check(call, atol=1e-10):
    found, expected = linear_by_chunks(call), written_out(call)
    torch.testing.assert_close(found, expected, atol=atol, rtol=atol)
    cotangent = torch.randn_like(expected)
    for _ in range(2):  # backward leaves what was kept as it is
        grads = torch.autograd.grad(found, leaves(call), cotangent, retain_graph=True)
    for a, b in zip(grads, torch.autograd.grad(expected, leaves(call), cotangent), strict=True):
        torch.testing.assert_close(a, b, atol=atol, rtol=atol)


@pytest.mark.parametrize(("row_map", "col_map"), list(product(MAPS, repeat=2)))
def test_output_and_gradients_equal_the_maps_written_out(row_map, col_map):
    check(Case(row_map=row_map, col_map=col_map, groups=3, components=2).draw())


@settings(max_examples=25)
@given(
    case=st.builds(
        Case,
        sources=st.integers(1, 3),
        groups=st.integers(1, 2),
        components=st.integers(1, 3),
        rows=st.integers(1, 150),
        size=st.sampled_from([1, 8, 16, 33]),
        value_size=st.sampled_from([1, 16, 31, 32]),
        has_prior=st.booleans(),
        prior_per_key=st.booleans(),
        masked=st.booleans(),
        dropped=st.booleans(),
        divides=st.booleans(),
        is_causal=st.booleans(),
    ),
    cols=st.integers(1, 150),
    seed=st.integers(0, 2**16),
)
def test_any_sizes_and_switches(case, cols, seed):
    torch.manual_seed(seed)
    case.cols = case.rows if case.is_causal else cols
    check(case.draw())


@pytest.mark.parametrize("length", [11, 12, 13, 47, 48, 49, 95, 96, 97])
def test_every_edge_of_a_chunk(length):
    check(Case(rows=length, cols=length, size=16, value_size=16).draw())


@pytest.mark.parametrize("threads", [2, 3, 8])
@pytest.mark.parametrize("is_causal", [False, True])
def test_any_number_of_threads_gives_the_same_bits(threads, is_causal):
    call = Case(sources=3, is_causal=is_causal).draw()

    def run():
        out = linear_by_chunks(call)
        return [out, *torch.autograd.grad(out.sin().sum(), leaves(call))]

    before, alone = torch.get_num_threads(), run()
    torch.set_num_threads(threads)
    try:
        assert all(torch.equal(a, b) for a, b in zip(run(), alone, strict=True))
    finally:
        torch.set_num_threads(before)


def test_states_of_a_job_have_a_limit(monkeypatch):
    """Sources that do not fit are in other jobs; the order of the sums is the same."""
    call = Case(sources=4, size=16, value_size=16).draw()
    together = linear_by_chunks(call)
    assert len(linear._jobs(call)) == 2
    monkeypatch.setattr(linear, "_STATE_ENTRIES", 1)
    assert len(linear._jobs(call)) == 8
    assert torch.equal(linear_by_chunks(call), together)


@pytest.mark.parametrize("is_causal", [False, True])
def test_heads_that_are_views_of_tokens(is_causal):
    """As layers give them: heads of a position side by side."""
    tokens = [torch.randn(2, 37, 3, 5, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    query, key, value = (x.transpose(1, 2) for x in tokens)
    call = LinearInputs(
        query, key[:, :, None], value, None, None, None, 1, 1, True, is_causal, 1e-3, 0.7
    )
    found, expected = linear_by_chunks(call), written_out(call)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)
    assert found.transpose(1, 2).is_contiguous()  # joining heads copies nothing
    cotangent = torch.randn_like(expected)
    grads = (torch.autograd.grad(y, tokens, cotangent) for y in (found, expected))
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, atol=1e-11, rtol=1e-11)


@pytest.mark.parametrize("is_causal", [False, True])
def test_single_precision_error_is_that_of_eager_code(is_causal):
    """Errors against float64 are at most twice those of the same maps in float32."""
    call = Case(rows=300, cols=300, size=32, value_size=32, components=2, is_causal=is_causal)
    exact = call.draw()
    low = exact._replace(
        **{
            n: getattr(exact, n).detach().float().requires_grad_()
            for n in ("query", "key", "value", "prior")
        }
    )
    cotangent = torch.randn_like(exact.value[:, :1]).expand(-1, 2, -1, -1)
    results = []
    for call, attend in ((exact, written_out), (low, written_out), (low, linear_by_chunks)):
        out = attend(call)
        grads = torch.autograd.grad(out, leaves(call), cotangent.to(out.dtype))
        results.append([x.detach().double() for x in (out, *grads)])
    for expected, eager, found in zip(*results, strict=True):
        allowed = 2.0 * (eager - expected).norm() + 1e-7 * expected.norm()
        assert (found - expected).norm() <= allowed


def test_values_and_keys_that_are_masked_may_be_anything():
    call = Case(masked=True, components=2).draw()
    with torch.no_grad():
        call.value.masked_fill_(~call.key_mask[:, None, :, None], float("nan"))
        call.key.masked_fill_(~call.key_mask[:, None, None, :, None], float("nan"))
    out = linear_by_chunks(call)
    assert out.isfinite().all()
    for name, grad in zip(
        ("query", "key", "value", "prior"),
        torch.autograd.grad(out.sum(), leaves(call)),
        strict=True,
    ):
        assert grad.isfinite().all(), name
        if name in ("key", "value"):
            hidden = ~call.key_mask[:, None, :, None]
            hidden = hidden[:, :, None] if name == "key" else hidden
            assert (grad.masked_select(hidden) == 0).all()


def test_nan_of_a_real_key_is_not_lost():
    for row_map in ("elu", "relu"):
        call = Case(row_map=row_map, col_map=row_map, is_causal=False).draw()
        with torch.no_grad():
            call.key[0, 0, 0, 3, 2] = float("nan")
        assert linear_by_chunks(call)[0, 0].isnan().all()


def test_rows_without_a_sum_give_zeros_and_faint_ones_no_gradient():
    call = Case(1, 1, 1, 1, 6, 6, 3, 2, "relu", "relu").draw()._replace(eps=0.0)
    with torch.no_grad():
        call.query[..., :2, :], call.key[..., 0, :] = -1.0, 1.0
        call.query[..., 2, :] = 1e-200  # its sum is above the least number, and its square is not
    found = linear_by_chunks(call)
    assert torch.equal(found[..., :2, :], torch.zeros(1, 1, 2, 2, dtype=torch.float64))
    assert (found[..., 2, :] != 0).all()
    grads = torch.autograd.grad(found.sum(), leaves(call))
    assert all(grad.isfinite().all() for grad in grads)
    assert (grads[0][..., :3, :] == 0).all()
    assert (grads[0][..., 3:, :] != 0).any()


@pytest.mark.parametrize("name", ["query", "key", "value", "prior"])
def test_only_the_gradients_that_are_needed(name):
    call = Case(components=2).draw()
    expected = torch.autograd.grad(written_out(call).sum(), getattr(call, name))[0]
    for other in {"query", "key", "value", "prior"} - {name}:
        getattr(call, other).requires_grad_(False)
    (found,) = torch.autograd.grad(linear_by_chunks(call).sum(), getattr(call, name))
    torch.testing.assert_close(found, expected, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_prior_that_is_expanded_over_positions_has_all_gradients(is_causal):
    call = Case(components=2, is_causal=is_causal).draw()
    check(call._replace(prior=call.prior.expand(-1, -1, 60)))


def test_without_a_backward_pass_nothing_is_kept():
    call = Case().draw()
    found, kept = linear._forward(call, False)
    assert kept.numel() == 0
    assert torch.equal(found, linear_by_chunks(call))


@pytest.mark.parametrize("is_causal", [False, True])
def test_predictions_of_memory_run_it_without_numbers(is_causal):
    call = Case(components=2, is_causal=is_causal).draw()
    call = call._replace(
        **{n: getattr(call, n).to("meta") for n in ("query", "key", "value", "prior")}
    )
    found = linear_by_chunks(call)
    assert found.is_meta
    assert found.shape == (2, 2, 60, 7)
    assert torch.autograd.grad(found.sum(), call.query)[0].shape == call.query.shape


@pytest.mark.parametrize("sizes", [{"batch": 0}, {"rows": 0, "is_causal": False}])
def test_calls_without_rows(sizes):
    call = Case(**sizes).draw()
    out = linear_by_chunks(call)
    assert out.numel() == 0
    assert all((grad == 0).all() for grad in torch.autograd.grad(out.sum(), leaves(call)))


def test_there_is_no_second_derivative():
    call = Case().draw()
    with pytest.raises(NotImplementedError, match="create_graph=True"):
        torch.autograd.grad(linear_by_chunks(call).sum(), call.query, create_graph=True)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"key": torch.zeros(2, 2, 17, 60, 5)}, NotImplementedError),
        ({"key": torch.zeros(2, 2, 2, 60, 5)}, ValueError),
        ({"key": torch.zeros(2, 2, 1, 61, 5)}, ValueError),
        ({"value": torch.zeros(2, 2, 60, 7)}, TypeError),
    ],
)
def test_calls_that_it_does_not_support(changes, error):
    with pytest.raises(error):
        linear_by_chunks(Case().draw()._replace(**changes))


@pytest.mark.parametrize(
    ("make", "is_causal"),
    [pytest.param(LinearAttention, False, marks=pytest.mark.slow), (MLKAttention, True)],
)
def test_a_compiled_layer_calls_it_as_an_operator(make, is_causal):
    layer, graphs = make(8, 2, backend="native"), []

    def record(graph, inputs):
        graphs.append(graph)
        return graph

    def run(layer):
        out = layer(torch.linspace(-1.0, 1.0, 400).view(1, 50, 8), is_causal=is_causal)
        return [out, *torch.autograd.grad(out.sin().sum(), list(layer.parameters()))]

    compiled = run(torch.compile(layer, fullgraph=True, backend=record))
    assert "linear_chunks" in graphs[0].code
    for a, b in zip(compiled, run(layer), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


def test_the_operators_pass_opcheck_with_heads_that_are_views_of_tokens():
    """Gradients then have other strides than new tensors, which compiled code relies on."""
    call = Case(components=2, rows=20, cols=20, dtype=torch.float32).draw()
    views = {
        name: getattr(call, name).transpose(1, -2).contiguous().transpose(1, -2).detach()
        for name in ("query", "key", "value")
    }
    call = call._replace(**{name: x.requires_grad_() for name, x in views.items()})
    operators = torch.ops.lit_probattn
    torch.library.opcheck(operators.linear_chunks.default, tuple(call))
    with torch.no_grad():
        out, kept = operators.linear_chunks(*call)
        given = (torch.ones_like(out), out, kept, *call)
        with FakeTensorMode() as mode:
            fakes = [mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in given]
            expected = operators.linear_chunks_backward(*fakes, [True] * 4)
        found = operators.linear_chunks_backward(*given, [True] * 4)
    assert [x.stride() for x in found] == [x.stride() for x in expected]
