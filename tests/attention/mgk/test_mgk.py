"""MGK: the identities of its definition, its limits, its M-step, and what it refuses."""

from __future__ import annotations

import pytest
import torch

from lit_probattn.attention import MGKAttention, SoftmaxAttention
from lit_probattn.attention.mgk.core import MixtureVariance
from lit_probattn.attention.mgk.functions import MGK, mgk_scores
from lit_probattn.attention.numerics import first_maximum
from tests.support.helpers import double

B, H, N, L, E, K, C = 2, 3, 11, 13, 5, 3, 17
EXACT = 1e-13


def scores_of(query, key, prior, sigma2, **options):
    defaults = {
        "equal_variance": False,
        "score": "gaussian",
        "include_log_det": False,
        "hard": False,
    }
    log_prior = None if prior is None else prior.log()
    return mgk_scores(query, key, MGK(log_prior, sigma2, **{**defaults, **options}))


@pytest.fixture
def mixture():
    return {
        "query": double(B, H, N, E),
        "key": double(B, H, K, L, E),
        "prior": torch.rand(H, K, 1, dtype=torch.float64) + 0.1,
        "sigma2": torch.rand(H, K, dtype=torch.float64) + 0.5,
    }


def test_t2_adding_a_function_of_the_query_changes_nothing(mixture):
    q, k, prior, sigma2 = mixture.values()
    sigma2 = torch.full_like(sigma2, 1.7)
    with_norm = torch.softmax(scores_of(q, k, prior, sigma2), -1)
    tau = 1 / 1.7
    no_norm = (q[:, :, None] @ k.mT) * tau + prior.log()[None, ..., None].mT
    no_norm = no_norm - (k.square().sum(-1) * tau / 2)[:, :, :, None]
    weights = torch.softmax(no_norm.logsumexp(2), -1)
    torch.testing.assert_close(with_norm, weights, atol=EXACT, rtol=0)


@pytest.mark.parametrize("hard", [False, True])
def test_t3_identical_components_are_one_component(mixture, hard):
    q, k, prior, _ = mixture.values()
    sigma2 = torch.full((H, K), 0.8, dtype=torch.float64)
    same = k[:, :, :1].expand(-1, -1, K, -1, -1)
    prior = None if hard else prior
    many = torch.softmax(scores_of(q, same, prior, sigma2, hard=hard), -1)
    one = torch.softmax(scores_of(q, k[:, :, :1], None, sigma2[:, :1]), -1)
    torch.testing.assert_close(many, one, atol=EXACT, rtol=0)


@pytest.mark.parametrize("e_step", ["learned", "hard"])
def test_t4_dot_smgk_with_equal_variances_is_softmax(e_step):
    with pytest.warns(UserWarning, match="ordinary softmax attention"):
        smgk = MGKAttention(
            C, H, head_dim=E, shifted_keys=True, score="dot", e_step=e_step
        ).double()
    softmax = SoftmaxAttention(C, H, head_dim=E).double()
    softmax.load_state_dict(
        {n: p for n, p in smgk.state_dict().items() if n.split(".")[0].endswith("_proj")}
    )
    x = double(B, N, C)
    torch.testing.assert_close(smgk(x), softmax(x), atol=EXACT, rtol=0)


def test_one_component_is_the_gaussian_kernel():
    mgk = MGKAttention(C, H, head_dim=E, num_components=1).double()
    gaussian = SoftmaxAttention(C, H, head_dim=E, score="gaussian").double()
    gaussian.load_state_dict(mgk.state_dict(), strict=False)
    x = double(B, N, C)
    torch.testing.assert_close(mgk(x), gaussian(x), atol=EXACT, rtol=0)


def test_unit_norm_keys_make_one_component_the_dot_product(mixture):
    q, k = mixture["query"], torch.nn.functional.normalize(mixture["key"][:, :, :1], dim=-1)
    sigma2 = torch.full((H, 1), E**0.5, dtype=torch.float64)
    ours = torch.softmax(scores_of(q, k, None, sigma2), -1)
    dot = torch.softmax(q @ k[:, :, 0].mT / E**0.5, -1)
    torch.testing.assert_close(ours, dot, atol=EXACT, rtol=0)


def test_hard_is_the_limit_of_small_variances(mixture):
    """With priors 1, l_soft − l_hard is at most log K, and its share of the scores vanishes."""
    q, k, prior, sigma2 = mixture.values()
    soft = scores_of(q, k, torch.ones_like(prior), sigma2)
    hard = scores_of(q, k, None, sigma2, hard=True)
    gap = soft - hard
    assert (gap >= -EXACT).all()
    assert (gap <= torch.tensor(K).log() + EXACT).all()
    tiny = 1e-4 * sigma2
    relative = scores_of(q, k, torch.ones_like(prior), tiny) / scores_of(
        q, k, None, tiny, hard=True
    )
    assert (relative - 1).abs().max() < 1e-3


# ---------------------------------------------------------------------------- parameters, cost
def test_parameter_counts_of_the_closed_form():
    """Appendix B: ((K+2)/K)·HEC + … with H the baseline's heads; biases and priors added."""
    heads, c, e, k = 4, 64, 32, 2
    mgk = MGKAttention(c, heads // k, head_dim=e, num_components=k, bias=False)
    assert mgk.cost(7).num_parameters == (k + 2) * heads * e * c // k + heads * e * c // k + heads
    smgk = MGKAttention(c, heads // k, head_dim=e, num_components=k, bias=False, shifted_keys=True)
    expected = 3 * heads * e * c // k + heads * e * c // k + heads * e + heads
    assert smgk.cost(7).num_parameters == expected


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("kv_heads", [3, 1])
@pytest.mark.parametrize(
    ("options", "per_owner", "per_layer"),
    [
        ({}, 1, 0),
        ({"e_step": "soft"}, 0, 0),
        ({"e_step": "hard", "learn_variance": True}, 1, 0),
        ({"prior_share": "layer"}, 0, 1),
        ({"prior_share": "head_position", "max_positions": 7, "learn_variance": True}, 8, 0),
    ],
)
def test_parameters_of_every_option(options, per_owner, per_layer, kv_heads, shifted):
    """Per component and owner of mixtures: priors, variances, a shift; beside projections."""
    c, h, e, k = 11, 3, 5, 2
    sizes = {"head_dim": e, "num_kv_heads": kv_heads, "num_components": k}
    layer = MGKAttention(c, h, shifted_keys=shifted, **sizes, **options)
    keys = kv_heads * e * (1 if shifted else k)
    expected = (c + 1) * (h * e + keys + kv_heads * e) + (h * e + 1) * c
    expected += k * (kv_heads * (per_owner + (e if shifted else 0)) + per_layer)
    assert layer.cost(7).num_parameters == expected


def test_paper_operation_counts():
    """Unit values of the cost specification: N=256, H=8, E=16, C=128, output width HE."""
    assert SoftmaxAttention(128, 8, head_dim=16).cost(256).paper_flops == 66_420_736
    assert MGKAttention(128, 4, head_dim=16).cost(256).paper_flops == 45_760_512
    assert MGKAttention(128, 4, head_dim=16, shifted_keys=True).cost(256).paper_flops == 41_615_360


@pytest.mark.parametrize("shifted", [None, False, True])
def test_operations_of_shared_keys_and_unlike_values(shifted):
    """Six query heads of 5 share two key heads and two value heads of 7; N = 11, C = 13."""

    def product(rows, inner, cols):
        return rows * cols * (inner + inner - 1)

    sizes = {"head_dim": 5, "value_head_dim": 7, "num_kv_heads": 2}
    if shifted is None:
        layer, k, keys = SoftmaxAttention(13, 6, **sizes), 1, 2 * product(11, 13, 5)
    else:
        layer, k = MGKAttention(13, 6, num_components=3, shifted_keys=shifted, **sizes), 3
        adds = 2 * 3 * 11 * 5
        keys = 2 * product(11, 13, 5) + adds if shifted else 2 * 3 * product(11, 13, 5)
    scores = 6 * (k * product(11, 5, 11) + (k - 1) * 11 * 11)
    values = 2 * product(11, 13, 7) + 6 * product(11, 11, 7)
    expected = 6 * product(11, 13, 5) + keys + scores + values + product(11, 6 * 7, k * 6 * 7)
    assert layer.cost(11).paper_flops == expected


def test_densities_are_without_their_determinants_unless_asked():
    """As in the paper's equation, whose priors absorb them."""
    x, given = double(B, N, C), {"num_components": K, "variance": [1.0, 3.0, 0.5]}
    layers = [
        MGKAttention(C, H, head_dim=E, **given, **more).double()
        for more in ({}, {"include_log_det": False}, {"include_log_det": True})
    ]
    for layer in layers[1:]:
        layer.load_state_dict(layers[0].state_dict())
    plain, without, exact = (layer(x) for layer in layers)
    assert torch.equal(plain, without)
    assert not torch.allclose(plain, exact)


def test_fixed_variances_are_kept_in_float64():
    fixed = MixtureVariance((1.0, 0.1), num_heads=3, head_dim=E, learn=False).fixed
    assert fixed.tolist() == [[5**0.5, 0.1 * 5**0.5]] * 3


# ---------------------------------------------------------------------------- bad input
@pytest.mark.parametrize("log_variance", [-9.0, 9.0])
def test_learned_variances_stop_at_their_bound_and_return_from_it(log_variance):
    variance = MixtureVariance((1.0,) * K, H, E, learn=True)
    torch.nn.init.constant_(variance.log_variance, log_variance)
    for way in (-1.0, 1.0):  # of a descent step
        (gradient,) = torch.autograd.grad(-way * variance().sum(), variance.log_variance)
        assert (gradient == 0).tolist() == [[way * log_variance > 0] * K] * H

        def loss(log_variance, way=way):
            given = {"log_variance": log_variance}
            return -way * torch.func.functional_call(variance, given, ()).sum()

        values = variance.log_variance.detach()
        assert torch.equal(torch.func.grad(loss)(values), gradient)
        assert torch.equal(torch.func.vmap(torch.func.grad(loss))(values[None])[0], gradient)
        _, slope = torch.func.jvp(loss, (values,), (torch.ones_like(values),))
        assert slope == 0
        assert torch.func.functionalize(loss)(values) == loss(values)


@pytest.mark.parametrize("learn", [False, True])  # by gradient, or by the M-step
def test_the_bound_of_learned_variances_contains_the_initial_ones(learn):
    multipliers = (1 / 64, 1.0, 9.0)
    variance = MixtureVariance(multipliers, H, E, learn=learn, by_m_step=not learn).double()
    expected = torch.tensor(multipliers, dtype=torch.float64).mul(E**0.5).expand(H, K)
    torch.testing.assert_close(variance(), expected, atol=0.0, rtol=1e-6)
    if not learn:
        weights = torch.ones(H, K, dtype=torch.float64)
        variance.apply_statistics(torch.stack([expected * E, weights]))
        torch.testing.assert_close(variance(), expected, atol=0.0, rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"variance": [1.0, -2.0]}, "must be positive"),
        ({"variance": "papr_main"}, "unknown variance preset"),
        ({"variance": "code_lm", "num_components": 3}, "code_lm is for 2 components"),
        ({"prior_share": "head_position"}, "needs max_positions"),
        ({"key_norm_weight": 0.5, "score": "dot"}, "is for score=gaussian, received score=dot"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        MGKAttention(C, H, head_dim=E, **options)


def test_unsupported_backend_names_supported_ones():
    layer = MGKAttention(C, H, head_dim=E, e_step="hard", backend="sdpa")
    with pytest.raises(NotImplementedError, match=r"maximum over components.*blockwise"):
        layer(torch.randn(B, N, C))
    layer = MGKAttention(C, H, head_dim=E, dropout=0.1, backend="sdpa")
    with pytest.raises(NotImplementedError, match=r"dropout.*reference, blockwise"):
        layer(torch.randn(B, N, C))
    layer.eval()(torch.randn(B, N, C))


def test_the_first_largest_component_takes_the_gradient():
    """Ties and infinite scores against a loop; NaN is not hidden by another component."""
    low, nan = float("-inf"), float("nan")
    table = [[1.0, 1, 1], [0, 2, 2], [2, 0, 2], [low, low, low], [low, 3, low], [1, 2, 3]]
    scores = torch.tensor(table, dtype=torch.float64).T.contiguous().requires_grad_()
    largest = first_maximum(scores.unbind(0))
    assert torch.equal(largest, scores.detach().amax(0))
    weight = torch.arange(1.0, 7.0, dtype=torch.float64)
    (found,) = torch.autograd.grad((largest * weight).masked_fill(largest == low, 0).sum(), scores)
    expected = torch.zeros_like(scores)
    for column, row in enumerate(table):
        if max(row) > low:
            expected[row.index(max(row)), column] = weight[column]
    assert torch.equal(found, expected)
    assert first_maximum([torch.tensor([1.0, nan]), torch.tensor([nan, 1.0])]).isnan().all()
    for wanted in (0, 1):  # one of the two has a gradient
        pair = [torch.tensor([1.0, 3.0]), torch.tensor([2.0, 0.0])]
        first_maximum([x.requires_grad_(r == wanted) for r, x in enumerate(pair)]).sum().backward()
        assert torch.equal(pair[wanted].grad, torch.tensor([[0.0, 1.0], [1.0, 0.0]][wanted]))
    apart = [torch.tensor([0.3, -0.9], dtype=torch.float64), torch.tensor([-0.4, 0.8]).double()]
    apart = [x.requires_grad_() for x in apart]
    assert torch.autograd.gradgradcheck(lambda *x: first_maximum(x).exp(), apart)


@pytest.mark.parametrize("create_graph", [False, True])
def test_jacobians_of_the_largest_component_can_be_vectorised(create_graph):
    pair = (torch.tensor([0.3, -0.9]), torch.tensor([-0.4, 0.8]))
    found = torch.autograd.functional.jacobian(
        lambda *x: first_maximum(x).exp(), pair, vectorize=True, create_graph=create_graph
    )
    diagonals = torch.stack([one.diagonal() for one in found])
    torch.testing.assert_close(
        diagonals, torch.tensor([[0.3, 0.0], [0.0, 0.8]]).exp() * torch.eye(2)
    )


def test_a_hard_e_step_gives_the_pair_to_the_likeliest_component():
    layer = MGKAttention(C, H, head_dim=E, e_step="hard", variance=[1.0, 3.0]).double()
    x = double(B, N, C)
    weights, shares = layer.core.posterior(layer.call(x))
    call = layer.call(x)
    apart = (call.query[:, :, None, :, None] - call.key[:, :, :, None]).square().sum(-1)
    first = (apart / (torch.tensor([1.0, 3.0]).view(2, 1, 1) * E**0.5)).argmin(2)
    assert torch.equal(shares, torch.stack([first == r for r in range(2)], 2).double())
    torch.testing.assert_close(weights, layer.weights(x), rtol=0, atol=EXACT)
