"""Everything that PyTorch keeps to itself and that we use all the same: its one home.

Each name has a test in `tests/test_torch_internals.py` that fails when PyTorch changes it, and a
test of the package refuses such names anywhere else.
"""

from __future__ import annotations

import copy
import socket
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as outside_modes

__all__ = [
    "CDIST_OPERATORS",
    "CPU_ATTENTION_OPERATORS",
    "FakeTensorMode",
    "FollowingModule",
    "RenamingModule",
    "TorchDispatchMode",
    "default_store",
    "in_backward",
    "is_decomposed",
    "loopback_store",
    "outside_modes",
    "packet_of",
    "peak_bytes",
    "softmax_backward",
    "storage_key",
    "with_child",
]

CDIST_OPERATORS = (torch.ops.aten._cdist_forward, torch.ops.aten._euclidean_dist)
CPU_ATTENTION_OPERATORS = (  # forward and backward
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward,
)


def loopback_store(port: int) -> dist.TCPStore:
    """Open the store where processes meet on a port of 127.0.0.1 only, in the process of rank 0.

    By itself PyTorch's store listens on every interface, and answers whoever asks. As long as this
    one is kept, a process group that is formed on the same port uses it.
    """
    listening = socket.create_server(("127.0.0.1", port))
    return dist.TCPStore(
        "127.0.0.1",
        listening.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listening.detach(),
    )


def in_backward() -> bool:
    """Whether this runs inside a backward pass, as recomputation of checkpoints does."""
    return torch._C._current_graph_task_id() != -1


def softmax_backward(grad: Tensor, output: Tensor) -> Tensor:
    """Return output ∘ (grad − Σ output ∘ grad), softmax's gradient over the last axis, fused."""
    return torch.ops.aten._softmax_backward_data(grad, output, -1, output.dtype)


def packet_of(operator: Any) -> Any:
    """Return the operator whose overload a dispatch mode sees."""
    return operator._overloadpacket


def is_decomposed(operator: Any) -> bool:
    """Whether PyTorch can express an operator in others."""
    return bool(operator._can_decompose())


def storage_key(tensor: Tensor) -> int:
    """Return a number that tensors on the same storage share, fake tensors too."""
    return int(tensor.untyped_storage()._cdata)


def peak_bytes(resident: Any, step: Any) -> int:
    """Return the most bytes on the CPU that exist at a time while `step` runs, `resident` included.

    Called under FakeTensorMode, for tensors that it made.
    """
    from torch.distributed._tools.mem_tracker import MemTracker

    tracker = MemTracker()
    tracker.track_external(*resident)
    with tracker:
        step()
    return int(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])


def default_store() -> Any:
    """Return a connection of its own to the key-value store of the process group."""
    return dist.distributed_c10d._get_default_store().clone()


def with_child(module: nn.Module, name: str, child: nn.Module) -> Any:
    """Return a shallow copy of a module with another child; `module` keeps its own."""
    copied = copy.copy(module)
    copied.__dict__["_modules"] = {**module._modules, name: child}
    return copied


class FollowingModule(nn.Module):
    """A module that acts after it was moved or cast."""

    def after_move(self) -> None:
        """Put right what a move or cast of all tensors has changed."""

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        self.after_move()
        return self


class RenamingModule(nn.Module):
    """A module that reads state dicts with old names."""

    def rename_state(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Rename entries of a state dict, in place, before the module takes its own."""

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        self.rename_state(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)
