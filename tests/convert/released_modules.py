"""The released attention modules written out, with the names of their parameters.

Names and formulas are those of the specification; everything else (order of axes, dropout, residual
paths) is left out or ours. A module takes tokens (B, N, C) and which pairs are visible, 1.0 or 0.0,
(B, 1, N, L).
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import elu


def heads(x, count):
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def joined(x):
    return x.transpose(1, 2).flatten(2)


def squared(q, k):
    return (q[:, :, :, None] - k[:, :, None]).square().sum(-1)


def over_rows(density, eps=0.0):
    return density / (density.sum(-1, keepdim=True) + eps)


def phi(x, norm=False):
    x = elu(x) + 1
    return x / x.sum(-1, keepdim=True) if norm else x


class Kernel(nn.Module):
    """What holds shifts and priors of the Long Range Arena code."""

    def __init__(self, mu, pi, is_buffer):
        super().__init__()
        if mu is not None:
            self.mu = nn.Parameter(mu)
        if pi is None:
            return
        if is_buffer:
            self.register_buffer("pi", pi)
        else:
            self.pi = nn.Parameter(pi)


class LongRangeArena(nn.Module):
    """W_q, W_k, [W_k2], W_v, ff; priors and shifts in `attn`."""

    def __init__(self, kind, option="", width=0, count=0, size=0, length=0, em=""):
        super().__init__()
        if not isinstance(option, str):  # `partial` without an option
            option, width, count, size, length = "", option, width, count, size
        self.kind, self.option, self.em, self.count, self.size = kind, option, em, count, size
        names = ["W_q", "W_k", "W_v", *(["W_k2"] if option == "key2" else [])]
        for name in names:
            setattr(self, name, nn.Linear(width, count * size))
        self.ff = nn.Linear(count * size, width)
        pi = torch.zeros(count, length) if em == "soft" else torch.zeros(2)
        pi = None if em == "hard" or not option else pi
        mu = torch.zeros(2, count, size) if option == "multi_gauss" else None
        inner = Kernel(mu, pi, em == "soft")
        self.attn = inner
        if kind == "softmax" and mu is not None:
            self.attn = nn.Module()
            self.attn.multi_gauss_kernel = inner
            if not em:
                self.attn.pi = inner.pi  # the same, by a second name
        self.inner = [inner]

    def priors(self):
        pi = self.inner[0].pi
        if self.em == "soft":
            return pi[:, None], 1 - pi[:, None]
        return pi.clamp(0, 1).unbind()

    def keys(self, x):
        k = heads(self.W_k(x), self.count)
        if self.option == "key2":
            return k, heads(self.W_k2(x), self.count)
        mu = self.inner[0].mu
        return k - mu[0][:, None], k - mu[1][:, None]

    def forward(self, x, visible):
        q, v = heads(self.W_q(x), self.count), heads(self.W_v(x), self.count)
        root = self.size**0.5
        if self.kind == "linear":
            if self.option:
                k = sum(p * k for p, k in zip(self.priors(), self.keys(x), strict=True))
            else:
                k = heads(self.W_k(x), self.count)
            out = (phi(q) @ phi(k).mT * visible) @ v / x.shape[1] ** 0.5  # padded length
            return self.ff(joined(out))
        if not self.option:
            density = (q @ heads(self.W_k(x), self.count).mT / root).exp()
        elif self.em == "hard":
            k1, k2 = self.keys(x)
            density = (-torch.minimum(squared(q, k1), squared(q, k2)) / (2 * root)).exp()
        else:
            both = zip(self.priors(), self.keys(x), strict=True)
            density = sum(p * torch.exp(-squared(q, k) / (2 * root)) for p, k in both)
        return self.ff(joined(over_rows(density * visible) @ v))


class LanguageModel(nn.Module):
    """q_net, kv_net, o_net; mu, pi0, pi1 or pi; the block's norm beside them."""

    def __init__(self, mode, width, count, size, length):
        super().__init__()
        self.mode, self.count, self.size = mode, count, size
        two = mode.endswith("2keys")
        self.q_net = nn.Linear(width, count * size, bias=False)
        self.kv_net = nn.Linear(width, (3 if two else 2) * count * size, bias=False)
        self.o_net = nn.Linear(count * size, width, bias=False)
        self.layer_norm = nn.LayerNorm(width)
        if mode in ("hard", "soft", "rbf"):
            self.mu = nn.Parameter(torch.zeros(2, count, size))
        if mode.startswith("soft") and mode != "softmax":
            self.register_buffer("pi", torch.zeros(count, 1, 1, length))
        if mode.startswith("rbf"):
            for name in ("pi0", "pi1"):
                setattr(self, name, nn.Parameter(torch.zeros(count, 1, 1, length)))

    def forward(self, x, visible):
        q = heads(self.q_net(x), self.count)
        parts = self.kv_net(x).chunk(3 if self.mode.endswith("2keys") else 2, -1)
        *keys, v = (heads(part, self.count) for part in parts)
        if self.mode == "softmax":
            density = torch.exp(q @ keys[0].mT / self.size**0.5) * visible
            return self.o_net(joined(over_rows(density) @ v))
        if len(keys) == 1:
            keys = [keys[0] - mu[:, None] for mu in self.mu]
        logs = [-c * squared(q, k) / self.size**0.5 for c, k in zip((0.5, 1.5), keys, strict=True)]
        if self.mode.startswith("hard"):
            density = torch.maximum(*logs).exp() * visible
            return self.o_net(joined(over_rows(density) @ v))
        if self.mode.startswith("soft"):
            priors = self.pi[:, 0], 1 - self.pi[:, 0]
        else:
            priors = self.pi0[:, 0].clamp(0, 1), self.pi1[:, 0].clamp(0, 1)
        density = sum(p * log.exp() for p, log in zip(priors, logs, strict=True)) * visible
        return self.o_net(joined(over_rows(density, 1e-6) @ v))


class LinearLanguageModel(nn.Module):
    """qkv_net, head by head, o_net; mu, pi0, pi1. `maps`: rows over their sums."""

    def __init__(self, mode, width, count, size, length, scale_w=1.0):
        super().__init__()
        self.mode, self.count, self.size, self.scale_w = mode, count, size, scale_w
        self.parts = 4 if mode == "rbf2keys" else 3
        self.qkv_net = nn.Linear(width, count * self.parts * size, bias=False)
        self.o_net = nn.Linear(count * size, width, bias=False)
        self.layer_norm = nn.LayerNorm(width)
        if mode == "rbf":
            self.mu = nn.Parameter(torch.zeros(2, count, size))
        if mode:
            for name in ("pi0", "pi1"):
                setattr(self, name, nn.Parameter(torch.zeros(count, length)))

    def forward(self, x, visible):
        parts = self.qkv_net(x).unflatten(-1, (self.count, self.parts, self.size)).unbind(3)
        q, *keys, v = (part.transpose(1, 2) for part in parts)
        if self.mode == "rbf":
            keys = [keys[0] - mu[:, None] for mu in self.mu]
        if self.mode:
            first, second = (phi(k, norm=True) for k in keys)
            pi0, pi1 = (p.clamp(0, 1)[..., None] for p in (self.pi0, self.pi1))
            features = first * pi0 + self.scale_w * second * pi1
        else:
            features = phi(keys[0], norm=True)
        kernel = phi(q, norm=True) @ features.mT * visible
        self.maps = over_rows(kernel)
        return self.o_net(joined(self.size**-0.5 * over_rows(kernel, 1e-5) @ v))


class Translation(nn.Module):
    """MGKAttention (k_proj1, k_proj2) and SMGKAttention (k_proj, mu), pi (2, H)."""

    def __init__(self, shifted, width, count, size, length):
        super().__init__()
        self.count, self.size, self.shifted = count, size, shifted
        names = ["q_proj", "v_proj", *(["k_proj"] if shifted else ["k_proj1", "k_proj2"])]
        for name in names:
            setattr(self, name, nn.Linear(width, count * size))
        self.out_proj = nn.Linear(count * size, width)
        self.pi = nn.Parameter(torch.zeros(2, count))
        if shifted:
            self.mu = nn.Parameter(torch.zeros(2, count, size))

    def forward(self, x, visible, memory=None):
        tokens = x if memory is None else memory
        q, v = heads(self.q_proj(x), self.count), self.v_proj(tokens)
        if self.shifted:
            if memory is None:
                v = v - self.v_proj.bias  # never added in self-attention
            k = heads(self.k_proj(tokens), self.count)
            keys = [k - mu[:, None] for mu in self.mu]
        else:
            keys = [heads(p(tokens), self.count) for p in (self.k_proj1, self.k_proj2)]
        density = sum(
            p.abs().clamp(1e-6, 2.0)[:, None, None] * torch.exp(-c * squared(q, k) / self.size**0.5)
            for p, c, k in zip(self.pi, (0.5, 1.5), keys, strict=True)
        )
        return self.out_proj(joined(over_rows(density * visible, 1e-6) @ heads(v, self.count)))


def network(first, count, layers=2, bias=True):
    """Linear, ReLU, Linear over the heads; or the first of them alone."""
    parts = [nn.Linear(first, count, bias), nn.ReLU(), nn.Linear(count, count, bias)]
    return nn.Sequential(*(parts if layers == 2 else parts[:1]))


def over_heads(net, x):
    return net(x.movedim(1, -1)).movedim(-1, 1)


def noise(module):
    """Return `draw`, (B, G, N, N), times the squares of sigma_noise; (1,) or (G,)."""
    if module.sigma_noise is None:
        return 0.0
    return module.sigma_noise[:, None, None] ** 2 * module.draw


class FiSHLanguageModel(nn.Module):
    """HDPAttn; without noise, the code has a scale all the same."""

    def __init__(self, width, count, size, length, scales=0, **mixing):
        super().__init__()
        self.count, self.size = count, size
        for name, number in (("q_net", 2), ("k_net", 2), ("v_net", count)):
            setattr(self, name, nn.Linear(width, number * size, bias=False))
        self.o_net = nn.Linear(count * size, width, bias=False)
        self.hdp_net = self.mixes(count, **mixing)
        self.layer_norm = nn.LayerNorm(width)
        self.sigma_noise = nn.Parameter(torch.zeros(scales)) if scales else None

    def mixes(self, count, **mixing):
        return network(2, count, **mixing)

    def forward(self, x, visible):
        q, k, v = (
            heads(p(x), n)
            for p, n in zip((self.q_net, self.k_net, self.v_net), (2, 2, self.count), strict=True)
        )
        scores = over_heads(self.hdp_net, q @ k.mT + noise(self)) / self.size**0.5
        return self.o_net(joined(over_rows(scores.exp() * visible) @ v))


class FiSHMixture(FiSHLanguageModel):
    """MixtureAttn without its noise: one map for all heads."""

    def mixes(self, count):
        return nn.Linear(2, 1, bias=False)


class FiSHTranslation(nn.Module):
    """HDPAttention in its modes q, k and qk, in training, and gqk, which has noise."""

    def __init__(self, mode, width, count, size, length):
        super().__init__()
        self.mode, self.count, self.size = mode, count, size
        self.numbers = (2 if "q" in mode else count, 2 if "k" in mode else count, count)
        for name, number in zip(("q_proj", "k_proj", "v_proj"), self.numbers, strict=True):
            setattr(self, name, nn.Linear(width, number * size))
        self.out_proj = nn.Linear(count * size, width)
        self.hdp_net = network(2, count)
        self.sigma_noise = nn.Parameter(torch.zeros(1)) if "g" in mode else None

    def forward(self, x, visible):
        projections = zip((self.q_proj, self.k_proj, self.v_proj), self.numbers, strict=True)
        q, k, v = (heads(p(x), n) for p, n in projections)
        if self.mode == "q":
            q = over_heads(self.hdp_net, q)
        elif self.mode == "k":
            k = over_heads(self.hdp_net, k)
        scores = q / self.size**0.5 @ k.mT
        if "qk" in self.mode:
            scores = over_heads(self.hdp_net, scores + noise(self))
        return self.out_proj(joined(over_rows(scores.exp() * visible) @ v))


class FiSHWindows(nn.Module):
    """WindowAttention_HDP in one window; its table of positions is beside attention."""

    def __init__(self, mode, width, count, size, length, **mixing):
        super().__init__()
        self.mode, self.count, self.size = mode, count, size
        self.numbers = (2 if "q" in mode else count, 2 if "k" in mode else count, count)
        self.relative_position_bias_table = nn.Parameter(torch.zeros(5, count))
        self.qkv = nn.Linear(width, sum(self.numbers) * size)
        self.proj = nn.Linear(count * size, width)
        self.hdp_proj = network(2, count, **mixing)

    def forward(self, x, visible, bias=0.0):
        parts = self.qkv(x).split([n * self.size for n in self.numbers], -1)
        q, k, v = (heads(part, n) for part, n in zip(parts, self.numbers, strict=True))
        if self.mode == "q":
            q = over_heads(self.hdp_proj, q)
        elif self.mode == "k":
            k = over_heads(self.hdp_proj, k)
        scores = q * self.size**-0.5 @ k.mT
        if self.mode == "qk":
            scores = over_heads(self.hdp_proj, scores)
        return self.proj(joined(over_rows((scores + bias).exp() * visible) @ v))
