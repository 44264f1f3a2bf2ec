"""What PyTorch keeps to itself and we use: each name as it is today.

A failure here means that the library has changed: mend the file that the test names.
`tests/house/test_imports.py` finds uses in other files.
"""

from __future__ import annotations

import inspect
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.flop_counter import flop_registry

from lit_probattn.base import torch_internals
from tests.support.helpers import LOOPBACK, listening_on


def test_backward_passes_are_told_apart():
    seen = []

    class Note(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            seen.append(torch_internals.in_backward())
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            seen.append(torch_internals.in_backward())
            return grad

    Note.apply(torch.ones((), requires_grad=True)).backward()
    assert seen == [False, True]


def test_several_gradients_at_once_are_recognized():
    seen = []

    class Note(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            seen.append(torch_internals.is_batched_gradient(grad))
            return grad

    x = torch.ones(3, requires_grad=True)
    Note.apply(x).sum().backward()
    torch.autograd.grad(Note.apply(x), x, torch.eye(3), is_grads_batched=True)
    assert seen == [False, True]


def test_a_module_has_other_tensors_inside_a_context_only():
    module = nn.BatchNorm1d(2)
    own, other = module.weight, torch.zeros(2, requires_grad=True)
    with torch_internals.with_tensors(module, {"weight": other, "running_mean": other}):
        assert module.weight is module.running_mean is other
    assert module.weight is own
    assert module.running_mean is not other


def test_tensors_of_transforms_are_unwrapped():
    seen = []

    def note(x):
        seen.append((torch_internals.is_mapped(x), torch_internals.outside_transforms(x)))
        return x.sum()

    x = torch.randn(3)
    torch.func.grad(note)(x)
    torch.func.vmap(torch.func.grad(note))(x[None])
    assert [mapped for mapped, _ in seen] == [False, True]
    assert seen[0][1].data_ptr() == x.data_ptr()


def test_functionalize_is_seen_through_other_transforms():
    seen = []

    def note(x):
        seen.append(torch_internals.is_functionalized())
        return torch_internals.outside_transforms(x.clone()).sum()

    x = torch.randn(3)
    torch.func.grad(note)(x)
    torch.func.functionalize(torch.func.grad(note))(x)
    torch.func.grad(torch.func.functionalize(note))(x)
    note(x)
    assert seen == [False, True, True, False]


def test_tangents_exist_inside_a_dual_level_only():
    assert not torch_internals.in_forward_mode()
    with torch.autograd.forward_ad.dual_level():
        assert torch_internals.in_forward_mode()


def test_operators_are_intercepted_by_modes_transforms_tracers_and_subclasses():
    class Mode(torch_internals.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    seen = []

    def note(x):
        seen.append(torch_internals.is_intercepted([torch.ones(2), x]))
        return x * 2

    x = torch.ones(3)
    note(x), note(torch.nn.Parameter(x)), note(x.clone().requires_grad_())
    assert seen == [False] * 3
    seen.clear()
    with Mode():
        note(x)
    with torch_internals.FakeTensorMode() as mode:
        note(mode.from_tensor(x))
    note(mode.from_tensor(x))
    note(x.to("meta"))
    note(x.as_subclass(type("Named", (torch.Tensor,), {})))
    torch.func.vmap(note)(x)
    torch.func.functionalize(note)(x)
    torch.fx.experimental.proxy_tensor.make_fx(note)(x)
    torch.jit.trace(note, x, check_trace=False)
    assert seen == [True] * 9


def test_an_export_is_no_compiled_graph():
    class Note(torch.nn.Module):
        def forward(self, x):
            return x + 1 if torch_internals.is_exporting() else x + 2

    x = torch.zeros(3)
    for strict in (False, True):
        program = torch.export.export(Note(), (x,), strict=strict).module()
        assert program(x).tolist() == [1.0] * 3
    compiled = torch.compile(Note(), backend="eager", fullgraph=True)
    assert compiled(x).tolist() == Note()(x).tolist() == [2.0] * 3


def test_below_autograd_nothing_is_recorded():
    x = torch.ones(2, requires_grad=True)
    with torch_internals.below_autograd():
        assert torch.is_grad_enabled()
        assert (2 * x).grad_fn is None
    assert (2 * x).grad_fn is not None


def test_functions_are_constants_of_graphs():
    def ours():
        return 1

    def theirs():
        return 1

    torch_internals.constant_in_graphs(ours)
    torch.compiler.assume_constant_result(theirs)
    assert vars(ours) == vars(theirs) != {}


def test_gradient_of_softmax():
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(3, 5, dtype=torch.float64)
    output = x.softmax(-1)
    (expected,) = torch.autograd.grad(output, x, grad)
    torch.testing.assert_close(torch_internals.softmax_backward(grad, output), expected)


def test_modes_see_operators_and_can_be_left():
    seen = []

    class Mode(torch_internals.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append((torch_internals.packet_of(func), torch_internals.is_decomposed(func)))
            return func(*args, **(kwargs or {}))

    x = torch.ones(3, 3)
    with Mode():
        x @ x
        with torch_internals.outside_modes():
            x @ x
        torch.ops.aten.silu_backward(x, x)
    with torch.autograd.graph.saved_tensors_hooks(seen.append, lambda x: x):
        with torch_internals.outside_modes():
            x.requires_grad_().exp()
        x.detach_()

    def leave(row):
        with torch_internals.outside_modes():
            assert not torch_internals.is_transformed()
            assert x.sum().item() == 9.0
        assert torch_internals.is_transformed()
        return row

    assert torch.equal(torch.func.vmap(torch.func.grad(lambda row: leave(row).sum()))(x), x)
    assert seen == [(torch.ops.aten.mm, False), (torch.ops.aten.silu_backward, True)]
    assert torch.ops.aten.mm in flop_registry


@pytest.mark.parametrize("kind", ["distances", "fused attention"])
def test_operators_that_are_counted_run_on_the_cpu(kind):
    seen = set()

    class Mode(torch_internals.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.add(torch_internals.packet_of(func))
            return func(*args, **(kwargs or {}))

    x = torch.randn(1, 2, 3, 4, requires_grad=True)
    with Mode():
        if kind == "distances":
            for rows in (3, 40):
                torch.cdist(torch.randn(rows, 4), torch.randn(rows, 4))
        else:
            nn.functional.scaled_dot_product_attention(x, x, x).sum().backward()
    counted = {
        "distances": torch_internals.CDIST_OPERATORS,
        "fused attention": torch_internals.CPU_ATTENTION_OPERATORS,
    }
    assert seen >= set(counted[kind])


def test_peak_and_storages_of_fake_tensors():
    with torch_internals.FakeTensorMode():
        x = torch.empty(1024)
        assert isinstance(x, torch_internals.FakeTensor)
        assert torch_internals.peak_bytes([x], lambda: x + 1) == 2 * 4096
        assert torch_internals.storage_key(x) == torch_internals.storage_key(x[3:])
        assert torch_internals.storage_key(x) != torch_internals.storage_key(x + 1)


def test_modules_are_told_of_moves_and_of_state_dicts():
    class Follower(torch_internals.FollowingModule, torch_internals.RenamingModule):
        def __init__(self):
            super().__init__()
            self.weight, self.moves = nn.Parameter(torch.zeros(1)), 0

        def after_move(self):
            self.moves += 1

        def rename_state(self, state_dict, prefix):
            state_dict[f"{prefix}weight"] = state_dict.pop(f"{prefix}old")

    parent = nn.ModuleDict({"a": Follower()}).double()
    parent.load_state_dict({"a.old": torch.ones(1)})
    assert parent["a"].moves == 1
    assert parent["a"].weight.item() == 1.0


def test_the_store_of_the_process_group():
    found = inspect.getattr_static(torch.distributed.distributed_c10d, "_get_default_store")
    assert list(inspect.signature(found).parameters) == []
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        torch_internals.default_store().set("key", "value")
        assert torch_internals.default_store().get("key") == b"value"
    finally:
        torch.distributed.destroy_process_group()


def test_the_store_on_loopback_works_with_a_process_group_of_the_same_port(monkeypatch):
    store = torch_internals.loopback_store(0)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    torch.distributed.init_process_group("gloo", rank=0, world_size=1)
    try:
        torch_internals.default_store().set("key", "value")
        assert any(
            b"value" in store.get(key) for key in ("key", "default_pg/0//key") if store.check([key])
        )
        assert listening_on(store.port) == [LOOPBACK]
    finally:
        torch.distributed.destroy_process_group()


def test_functions_outside_of_graphs_run_as_they_are():
    traced = []

    @torch_internals.outside_graphs
    def outside(x):
        traced.append(torch.compiler.is_compiling())
        return x.sum().item()

    @torch_internals.constant_in_graphs
    def constant(text):
        return len(text)

    def whole(x):
        doubled = 2 * x
        return doubled * outside(doubled) + constant("abc")

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    graphs = []
    compiled = torch.compile(whole, backend=backend)
    assert compiled(torch.ones(3)).tolist() == whole(torch.ones(3)).tolist() == [15.0] * 3
    assert traced == [False, False]
    assert len(graphs) == 2, "before the function, and behind it"
    inner = torch.compile(lambda x: x + constant("ab"), backend="eager", fullgraph=True)
    assert inner(torch.ones(1)).tolist() == [3.0]


def test_an_operator_can_be_defined_again():
    for result in (1, 2):
        library = torch_internals.library_of("lit_probattn_test", "again")
        library.define("again(Tensor x) -> Tensor")
        library.impl("again", lambda x, result=result: x * result, "CompositeExplicitAutograd")
        assert torch.ops.lit_probattn_test.again(torch.ones(2)).tolist() == [result] * 2


def test_the_handler_of_killed_loader_processes_is_removed_and_installed_again():
    def handler():
        return signal.getsignal(signal.SIGCHLD)

    def start_loader():
        assert next(iter(DataLoader(range(2), num_workers=1))).tolist() == [0]

    for _ in range(2):  # the second time, PyTorch's handler is there
        with torch_internals.worker_deaths_outside_locks():
            inside = handler()
            start_loader()
            assert handler() is inside
            with torch_internals.worker_deaths_outside_locks():
                assert handler() is not inside
            assert handler() is inside
        assert handler() is signal.SIG_DFL
        start_loader()
        assert handler().__module__ == "torch.utils.data._utils.signal_handling"


def test_only_the_main_thread_has_handlers():
    def run() -> str:
        with torch_internals.worker_deaths_outside_locks():
            return "ran"

    before = signal.getsignal(signal.SIGCHLD)
    with ThreadPoolExecutor() as other:
        assert other.submit(run).result() == "ran"
    assert signal.getsignal(signal.SIGCHLD) is before


def test_other_handlers_of_ended_processes_are_kept():
    ended = []
    before = signal.signal(signal.SIGCHLD, lambda *_: ended.append(len(ended)))
    try:
        with torch_internals.worker_deaths_outside_locks():
            signal.raise_signal(signal.SIGCHLD)
        signal.raise_signal(signal.SIGCHLD)
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert ended == [0, 1]
