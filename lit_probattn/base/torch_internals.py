"""All uses of private members of PyTorch.

Each name has a test in `tests/base/test_torch_internals.py` that fails when PyTorch changes it, and
another test forbids private names elsewhere.
"""

from __future__ import annotations

import _thread
import contextlib
import functools
import signal
import socket
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from traceback import walk_stack
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._library.custom_ops import get_library_allowing_overwrite as library_of
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)
from torch.utils._pytree import tree_iter

__all__ = [
    "CDIST_OPERATORS",
    "CPU_ATTENTION_OPERATORS",
    "FakeTensor",
    "FakeTensorMode",
    "FollowingModule",
    "FunctionalTensor",
    "RenamingModule",
    "TorchDispatchMode",
    "add_flop_formula",
    "below_autograd",
    "constant_in_graphs",
    "default_store",
    "in_backward",
    "in_forward_mode",
    "is_batched_gradient",
    "is_counted",
    "is_decomposed",
    "is_exporting",
    "is_functionalized",
    "is_intercepted",
    "is_mapped",
    "is_proxied",
    "is_transformed",
    "library_of",
    "loopback_store",
    "open_multi_head_attention",
    "outside_functions",
    "outside_graphs",
    "outside_modes",
    "outside_transforms",
    "packet_of",
    "peak_bytes",
    "recomputation",
    "register_flop_formulas",
    "softmax_backward",
    "storage_key",
    "with_tensors",
    "worker_deaths_outside_locks",
]

_Function = TypeVar("_Function", bound=Callable[..., Any])

CDIST_OPERATORS = (torch.ops.aten._cdist_forward, torch.ops.aten._euclidean_dist)
CPU_ATTENTION_OPERATORS = (  # forward and backward
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward,
)

# A context in which an operator is computed without recording its derivative.
below_autograd = torch._C._AutoDispatchBelowAutograd

# A context in which neither modes nor tensor subclasses intercept torch's functions.
outside_functions = torch._C.DisableTorchFunction

# A context in which a module has other parameters and buffers, a mapping by name, as inside
# `torch.func.functional_call`.
with_tensors = _reparametrize_module


def _check_padding(mask: Tensor, length: int, batch: int) -> None:
    """Check the size of a key-padding mask.

    PyTorch's own check has a message that contains the mask, which the compiler cannot trace.
    """
    if mask.shape != (batch, length):
        raise AssertionError(
            f"key_padding_mask has shape {tuple(mask.shape)}, expected {(batch, length)}"
        )


def _opened(function: Any) -> Any:
    """Return a copy of a torch function that does not dispatch to modes, and compiles."""
    known = {
        **function.__globals__,
        "has_torch_function": lambda _: False,
        "_check_key_padding_mask": _check_padding,
    }
    made = types.FunctionType(
        function.__code__, known, function.__name__, function.__defaults__, function.__closure__
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return made


# Modes intercept `F.multi_head_attention_forward` as a whole; with this copy they intercept the
# functions inside. Created once, since the compiler does not trace functions created in a call.
open_multi_head_attention = _opened(nn.functional.multi_head_attention_forward)


def recomputation() -> Any:
    """Return the saved-tensor frame of the innermost checkpoint around a call, or None."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


@contextlib.contextmanager
def outside_modes() -> Iterator[None]:
    """Leave dispatch modes, transforms of `torch.func`, and hooks of saved tensors.

    Hooks, for example of a checkpoint, would count tensors that are saved here. Transforms forbid
    them.
    """
    has_hooks = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message() is None
    hooks = torch.autograd.graph.saved_tensors_hooks(_same, _same)
    inner = hooks if has_hooks else contextlib.nullcontext()
    with temporarily_clear_interpreter_stack(), _disable_current_modes(), inner:
        yield


def _same(tensor: Tensor) -> Tensor:
    return tensor


def outside_graphs(function: _Function) -> _Function:
    """Act like `torch.compiler.disable`, without importing the compiler, which takes seconds.

    A call before the compiler is imported cannot be inside a graph.
    """
    outside = torch._disable_dynamo(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (outside if "torch._dynamo" in sys.modules else function)(*args, **kwargs)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    return cast(_Function, call)


def constant_in_graphs(function: _Function) -> _Function:
    """Act like `torch.compiler.assume_constant_result`, without importing the compiler."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def loopback_store(port: int) -> dist.TCPStore:
    """Open the rendezvous store on a port of 127.0.0.1, in the process of rank 0.

    By default PyTorch's store listens on all interfaces without authentication. While this store
    exists, a process group on the same port uses it.
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


def is_exporting() -> bool:
    """Return whether `torch.export` records this call, directly or through the compiler.

    The compiler of PyTorch 2.11 evaluates the public function of this name as True in all
    recordings.
    """
    return torch.compiler._is_exporting_flag


def is_proxied() -> bool:
    """Return whether `make_fx`, or a tracer based on it, records the operations of this thread."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


def is_transformed() -> bool:
    """Return whether this runs inside a transform of `torch.func`, or in forward-mode AD."""
    if torch.compiler.is_compiling():  # the compiler records transforms differently
        return False
    return torch._C._functorch.maybe_current_level() is not None or in_forward_mode()


def is_functionalized() -> bool:
    """Return whether this runs inside `torch.func.functionalize`.

    It has no rule for functions with their own derivative (`torch.autograd.Function`).
    """
    if torch.compiler.is_compiling():
        return False
    levels = torch._C._functorch.get_interpreter_stack() or ()
    return any(level.key() == torch._C._functorch.TransformType.Functionalize for level in levels)


def is_intercepted(tensors: Iterable[Tensor]) -> bool:
    """Return whether something between a call and its kernels needs to see an operator.

    These are the compiler, tracers, dispatch modes, transforms of `torch.func`, subclasses of
    Tensor, and tensors without data.
    """
    return (
        torch.compiler.is_compiling()
        or torch._C._is_tracing()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.maybe_current_level() is not None
        or any(type(x) not in (Tensor, nn.Parameter) or x.is_meta for x in tensors)
    )


_COUNTER = "torch.utils.flop_counter"
_formulas: dict[Any, Callable[..., int]] = {}


def add_flop_formula(operator: Any, formula: Callable[..., int]) -> None:
    """Let PyTorch's FLOP counter count an operator.

    It is registered when a call is counted or a graph recorded: PyTorch's counter imports Triton,
    which a layer must not.

    Args:
        formula: takes the arguments of the operator, with shapes for tensors.
    """
    _formulas[packet_of(operator)] = formula


def register_flop_formulas() -> None:
    """Register the formulas of `add_flop_formula`, also with active counters, which have copies."""
    counter: Any = import_module(_COUNTER)
    for packet, formula in _formulas.items():
        if packet not in counter.flop_registry:
            counter.register_flop_formula(packet)(formula)
    for mode in _get_current_dispatch_mode_stack():
        if isinstance(mode, counter._FlopCounterMode):
            known = {packet: counter.flop_registry[packet] for packet in _formulas}
            mode.counter.flop_registry = known | mode.counter.flop_registry  # keeps custom_mapping


def is_counted() -> bool:
    """Return whether a FLOP counter of PyTorch is active; it then has the formulas."""
    if torch.compiler.is_compiling() or not torch._C._len_torch_dispatch_stack():
        return False
    counter: Any = sys.modules.get(_COUNTER)
    if counter is None:
        return False
    modes = _get_current_dispatch_mode_stack()
    if not any(isinstance(mode, counter._FlopCounterMode) for mode in modes):
        return False
    register_flop_formulas()
    return True


def in_forward_mode() -> bool:
    """Return whether tensors may have tangents (`torch.autograd.forward_ad.dual_level`)."""
    return torch.autograd.forward_ad._current_level >= 0


def in_backward() -> bool:
    """Return whether this runs inside a backward pass, like the recomputation of checkpoints."""
    if torch.compiler.is_compiling():  # recomputation is part of the graph
        return False
    return torch._C._current_graph_task_id() != -1


def is_batched_gradient(grad: Tensor) -> bool:
    """Return whether a backward pass gets several gradients at once (`is_grads_batched=True`)."""
    return bool(torch._C._functorch.is_legacy_batchedtensor(grad))


def is_mapped(tensor: Tensor) -> bool:
    """Return whether a tensor is batched by `torch.func.vmap`."""
    if torch.compiler.is_compiling():
        return False
    return bool(torch._C._functorch.is_batchedtensor(outside_transforms(tensor)))


def outside_transforms(tensor: Tensor) -> Tensor:
    """Return a tensor that can outlive the transform in which it was computed.

    That is `torch.func.grad`, `jvp` or `functionalize`.
    """
    if torch.compiler.is_compiling():
        return tensor
    functorch = torch._C._functorch
    while functorch.is_gradtrackingtensor(tensor) or functorch.is_functionaltensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor


def softmax_backward(grad: Tensor, output: Tensor) -> Tensor:
    """Return output ∘ (grad − Σ output ∘ grad), the fused softmax gradient over the last axis."""
    return torch.ops.aten._softmax_backward_data(grad, output, -1, output.dtype)


def packet_of(operator: Any) -> Any:
    """Return the operator of an overload that a dispatch mode receives."""
    return operator._overloadpacket


def is_decomposed(operator: Any) -> bool:
    """Return whether PyTorch can decompose an operator."""
    return bool(operator._can_decompose())


def storage_key(tensor: Tensor) -> int:
    """Return the identity of a tensor's storage, also for fake tensors."""
    return int(tensor.untyped_storage()._cdata)


class _LiveBytes(TorchDispatchMode):
    """Adds the bytes of a storage when an operation returns it; subtracts them when it is freed.

    The work per operation is independent of the number of tensors. PyTorch's `MemTracker`, which
    computes the same bytes, iterates over all modules at every operation.
    """

    def __init__(self, inside: Mapping[str, Callable[..., Any]] | None = None) -> None:
        super().__init__()
        self.inside = inside or {}
        self.live = self.peak = 0
        self._known: dict[int, tuple[weakref.ref[Any], int]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True imports the compiler, which takes longer than most predictions

    def add(self, tensor: Tensor) -> None:
        """Count the storage of a tensor, or the change of its size."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        known = self._known.get(key)
        if known is None or known[1] != size:
            self.live += size - (0 if known is None else known[1])
            self.peak = max(self.peak, self.live)
            self._known[key] = (weakref.ref(storage, lambda _: self._forget(key)), size)

    def _forget(self, key: int) -> None:
        self.live -= self._known.pop(key)[1]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        run = self.inside.get(func._schema.name)
        if run is None:
            out = func(*args, **(kwargs or {}))
        else:
            with self:
                out = run(*args, **(kwargs or {}))
        for value in tree_iter(out):
            if isinstance(value, Tensor):
                self.add(value)
        return out


def peak_bytes(
    resident: Any, step: Any, inside: Mapping[str, Callable[..., Any]] | None = None
) -> int:
    """Return the peak of allocated bytes while `step` runs, including `resident`.

    For tensors without data. `inside` maps operators by name to their implementations, whose
    allocations also count.
    """
    tracker = _LiveBytes(inside)
    for item in resident:
        owned = [item] if isinstance(item, Tensor) else [*item.parameters(), *item.buffers()]
        for tensor in owned:
            tracker.add(tensor)
    with tracker:
        step()
    return tracker.peak


@contextlib.contextmanager
def worker_deaths_outside_locks() -> Iterator[None]:
    """Let PyTorch report killed loader processes only where no lock of `threading` is involved.

    PyTorch's handler of SIGCHLD raises wherever the main thread is. While that thread takes or
    returns a lock, the lock would stay taken for ever, and whatever needs it later, like the end of
    a queue, would wait for ever. There, the signal is repeated after a moment.

    After this context the handler is removed, so that it cannot raise in the code that treats the
    error; PyTorch installs it again for the next loader.
    """
    number = getattr(signal, "SIGCHLD", None)
    if number is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    from torch.utils.data._utils import signal_handling

    before, was_set = signal.getsignal(number), signal_handling._SIGCHLD_handler_set
    signal_handling._set_SIGCHLD_handler()
    report: Any = signal.getsignal(number)

    def report_outside_locks(number: int, frame: types.FrameType | None) -> None:
        modules = {at.f_globals.get("__name__") for at, _ in walk_stack(frame)}
        if modules.isdisjoint(("threading", "logging")):
            report(number, frame)
        else:  # threading.Timer itself would need locks
            _thread.start_new_thread(_repeat, (number,))

    signal.signal(number, report_outside_locks)
    try:
        yield
    finally:
        if before is None or getattr(before, "__module__", "") == signal_handling.__name__:
            before, was_set = signal.SIG_DFL, False
        signal.signal(number, before)
        signal_handling._SIGCHLD_handler_set = was_set


def _repeat(number: int) -> None:
    time.sleep(0.1)
    signal.pthread_kill(cast(int, threading.main_thread().ident), number)


def default_store() -> Any:
    """Return a separate connection to the key-value store of the process group."""
    return dist.distributed_c10d._get_default_store().clone()


class FollowingModule(nn.Module):
    """A module with a hook after moves and casts."""

    def after_move(self) -> None:
        """Restore state that a move or cast of all tensors has changed."""

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        self.after_move()
        return self


class RenamingModule(nn.Module):
    """A module that renames entries of state dicts before loading them."""

    def rename_state(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Rename entries of a state dict in place before they are loaded."""

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        self.rename_state(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)
