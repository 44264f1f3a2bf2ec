"""What `auto` would choose for each variant here, and whether kernels pass their self-tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress

import torch

from lit_probattn.attention import Attention, variants
from lit_probattn.attention.call import outline
from lit_probattn.doctor.findings import Finding
from lit_probattn.kernels import runtime, selftest
from lit_probattn.kernels.cpu import selftest as library

BACKENDS, KERNELS = "Backends that `auto` chooses", "Kernels"
# A batch of the Long Range Arena's Text, and a short one.
LONG, SHORT, BATCH, HEADS, HEAD_DIM = 4096, 128, 4, 4, 32


def check_backends() -> Iterator[Finding]:
    """Yield a line per variant and type of device."""
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    for name, cls in variants().items():
        for device in devices:
            yield _choices(name, cls, device)


def _choices(name: str, cls: Callable[..., Attention], device: str) -> Finding:
    label = f"{name} on {device}"
    try:
        layer = _layer(cls)
        calls = {
            f"training, {LONG} tokens, dropout": _choose(layer, device, LONG, True),
            f"training, {SHORT} tokens, dropout": _choose(layer, device, SHORT, True),
            f"evaluation, {LONG} tokens": _choose(layer.eval(), device, LONG, False),
        }
    except (ValueError, NotImplementedError, TypeError) as error:
        return Finding(BACKENDS, label, "note", f"no choice: {error}")
    return Finding(BACKENDS, label, "ok", "; ".join(f"{k}: {v}" for k, v in calls.items()))


def _layer(cls: Callable[..., Attention]) -> Attention:
    return cls(HEADS * HEAD_DIM, HEADS, head_dim=HEAD_DIM)


def _choose(layer: Attention, device: str, seq_len: int, dropout: bool) -> str:
    sizes = (BATCH, seq_len, seq_len)
    return layer.core.pick(outline(layer.layout, *sizes, device=device, dropout=dropout))


def check_kernels() -> Iterator[Finding]:
    """Yield the self-tests: the C library's, and every family of kernels', where there is a GPU."""
    reason = library.failure()
    text = "passes its self-test" if reason is None else reason
    yield Finding(KERNELS, "C library of the CPU", "ok" if reason is None else "note", text)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    why_not = runtime.refusal(device, torch.float32, HEAD_DIM)
    for family in _families():
        label = family.rpartition("/")[2]
        if device == "cpu" or why_not is not None:
            reason = why_not or "cannot be tested without a GPU"
            yield Finding(KERNELS, label, "note", f"not tested: {reason}")
            continue
        failed = selftest.run(family, torch.device(device), torch.float16, (HEAD_DIM, HEAD_DIM))
        passed = failed is None
        text = f"passes its self-test with heads of {HEAD_DIM}, float16"
        yield Finding(
            KERNELS, label, "ok" if passed else "problem", text if passed else failed or ""
        )


def _families() -> Iterator[str]:
    """Yield the families of kernels that variants have, each once."""
    known = set()
    for cls in variants().values():
        with suppress(ValueError):  # a package that the variant needs is missing
            for family in _layer(cls).core.makes.kernels:
                if family not in known:
                    known.add(family)
                    yield family
