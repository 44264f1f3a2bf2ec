"""`lit-probattn ask`: numbers, order, times of a sweep, what is refused."""

from __future__ import annotations

import functools
import json
import re
from itertools import product

import pytest
import torch
import yaml
from torch import nn

import lit_probattn
from lit_probattn.attention.engines import blocks
from lit_probattn.attention.engines.native import native_refusal
from lit_probattn.attention.fish import linear as fish_linear
from lit_probattn.attention.linear import chunkwise
from lit_probattn.attention.own import derived
from lit_probattn.commands.ask import layers, models
from lit_probattn.commands.ask.command import main, ranked, table
from lit_probattn.commands.ask.layers import Answer, Question, answer
from lit_probattn.commands.ask.measured import GPUS, with_times
from lit_probattn.commands.ask.models import TESTED, changes
from lit_probattn.compare.own import read_row
from lit_probattn.configs import attention_entry
from lit_probattn.interop.swap.report import LayerReport
from lit_probattn.kernels.cpu.selftest import failure
from lit_probattn.measure.counters import torch_macs
from lit_probattn.measure.memory import measured_cpu_bytes
from lit_probattn.randomness import RandomKey
from profiling.cli import main as profiling_main
from profiling.cost.models import AttentionOnly
from profiling.measure.rows import row_store
from profiling.sweep.config import load_sweep
from profiling.sweep.plan import make_plan
from profiling.sweep.points import measure_point
from profiling.sweep.run import claim_folder
from tests.profiling.helpers import sweep as small_sweep
from tests.support.helpers import error_of
from tests.support.paths import CONFIGS, ROOT
from tests.support.slow import mostly_slow

SMALL = Question(32, 64, num_heads=4, batch_size=2)
answered = functools.cache(answer)  # for tests of what is built, whose limits do not change it


@pytest.fixture
def few(monkeypatch):
    monkeypatch.setattr("lit_probattn.commands.ask.command.names", lambda: ["softmax", "mgk"])


@pytest.mark.parametrize("name", ["softmax", "mgk", "smgk", "fish", "linear"])
def test_numbers_are_those_of_the_layer(name):
    """Parameters of a real layer; operations counted, not computed, on what `cost` states."""
    found = answer(name, SMALL)
    layer = lit_probattn.create(name, 32, head_dim=8, **found.options)
    assert found.parameters == sum(p.numel() for p in layer.parameters())
    with torch.device("meta"):
        counted = AttentionOnly(lit_probattn.create(name, 32, head_dim=8, **found.options))
    counted.layer.backend, counted.layer.dropout = layer.core.makes.stated_backend, 0.0
    assert found.macs == torch_macs(counted, torch.empty(2, 64, 32, device="meta")).products
    assert found.inference_bytes > 0
    # `native` trains with dropout, and its own buffers are not counted (docs/choose.md).
    assert found.inference_bytes < found.training_bytes or "native" in found.backends


def test_every_variant_has_equal_dropout_and_the_share_of_heads_of_its_file():
    heads = {}
    for name in layers.names():
        entry = attention_entry(CONFIGS / f"attention/{name}.yaml")["init_args"]
        given = layers.heads(entry, SMALL, 8)
        heads[name] = (given["num_heads"], given.get("num_global_heads"))
        assert layers.good_for(name), name
    assert not any(name.startswith("as_released") for name in heads)
    assert heads["softmax"] == heads["linear"] == (4, None)
    assert heads["mgk"] == heads["smlk"] == (2, None)
    assert heads["fish"] == (4, 1)
    fish = [name for name, (_, shared) in heads.items() if shared is not None]
    assert len(fish) == 10
    for name in fish:  # one meaning everywhere: as README's table, of 8 heads
        entry = attention_entry(CONFIGS / f"attention/{name}.yaml")["init_args"]
        given = layers.heads(entry, Question(64, 64), 8)
        layer = lit_probattn.create(name, 64)
        row = read_row(name)
        config = attention_entry(row.attention)["init_args"] | dict(row.set)
        built = {"num_heads": layer.num_heads, "num_global_heads": layer.num_global_heads}
        for found in (entry, given, built, config):
            assert (found["num_heads"], found["num_global_heads"]) == (8, 2), name
    equal = Question(32, 64, num_heads=4, equal_heads=True)
    entry = attention_entry(CONFIGS / "attention/mgk.yaml")["init_args"]
    assert layers.heads(entry, equal, 8)["num_heads"] == 4
    assert answer("linear", SMALL).options["dropout"] == answer("mgk", SMALL).options["dropout"]
    odd = answer("mgk", Question(30, 64, num_heads=3))
    assert odd.problem == "1/2 of 3 heads is not a whole number"


def made(name, question, train, *, measured):
    """Return bytes of a step with the chosen backend: predicted, and measured where asked for."""
    known = answered(name, question)
    with torch.device("meta"):
        layer = layers.build(known, question)
    backend = layers.choose(layer, question, train)
    found = layers.memory(known, question, backend, train)
    if not measured:
        return backend, found

    def make():
        layer = layers.build(known, question).train(train)
        layer.backend = backend
        inputs = torch.randn(question.batch_size, question.seq_len, question.embed_dim)
        inputs.requires_grad_(train)

        def step():
            with torch.set_grad_enabled(train):
                out = layer(inputs, is_causal=question.is_causal, rng=RandomKey(0))
            if train:
                out.backward(torch.ones_like(out))

        return step, (layer, inputs)

    return backend, found, sum(measured_cpu_bytes(make))


# Never native; a variant that is removed needs no change here.
OWN = sorted({"ast", "dcmha", "elliptical", "parallax", "talking_heads"} & set(layers.names()))
NATIVE = ["smgk", "fish", "softmax", "mgk", "mgk_multi_query", "hard_fish", "hard_gfish"]


@pytest.mark.parametrize(
    ("name", "is_causal"),
    mostly_slow(
        product([*NATIVE, *OWN, "gfish", "polynomial"], [False, True]),
        [("smgk", False), ("smgk", True), ("fish", True), ("dcmha", True)],
    ),
)
def test_memory_is_what_the_backend_allocates(name, is_causal, monkeypatch):
    """Blocks are made small, so that there are many; the rest is single numbers."""
    native_refusal("cpu")  # its self-test at the first use is not the step's memory
    monkeypatch.setitem(blocks.BLOCK_SCORES, "cpu", 1 << (18 if name == "ast" else 13))
    question = Question(32, 331, num_heads=4, batch_size=3, is_causal=is_causal)
    for train in (True, False):
        backend, found, measured = made(name, question, train, measured=True)
        if backend == "sdpa":  # PyTorch's kernel has room of its own
            assert found <= measured
        else:
            assert found == pytest.approx(measured, abs=1024), backend
    if name in NATIVE and native_refusal("cpu") is None:
        assert made(name, question, True, measured=False)[0] == "native"


@pytest.mark.parametrize("name", mostly_slow(OWN, OWN[-1:]))
def test_a_prediction_computes_no_more_blocks_for_longer_sequences(name, monkeypatch):
    computed = []
    monkeypatch.setitem(blocks.BLOCK_SCORES, "cpu", 1 << 9)
    for module in (blocks, derived):
        original = module.grouped_values
        count = lambda *a, original=original: computed.append(1) or original(*a)  # noqa: E731
        monkeypatch.setattr(module, "grouped_values", count)
    numbers: list[int] = []
    for seq_len in (64, 256):
        question = Question(32, seq_len, num_heads=4)
        found = answer(name, question)
        computed.clear()
        layers.memory(found, question, "blockwise", True)
        numbers.append(len(computed))
    assert numbers[0] == numbers[1] > 0


@pytest.mark.parametrize(
    "name",
    mostly_slow(["linear", "favor", "smlk", "lfish", "glfish", "hard_glfish"], ["smlk"]),
)
def test_memory_of_causal_chunks_is_what_is_allocated(name, monkeypatch):
    """Spans and chunks are made small, so that most of them are not made in the prediction.

    Chunks of `glfish` are also in the test below.
    """
    monkeypatch.setitem(chunkwise.SPAN_PAIRS, "cpu", 1 << 12)
    monkeypatch.setitem(fish_linear.CHUNK_STATES, "cpu", 1 << 12)
    question = Question(64, 83, num_heads=4, batch_size=3, is_causal=True)
    for train in (True, False):
        _, found, measured = made(name, question, train, measured=True)
        assert found == pytest.approx(measured, abs=512), train


def test_chunks_with_heavier_inputs_than_states_are_all_predicted(monkeypatch):
    """Gradients of what chunks read then outgrow the states: most is held at backward's end."""
    monkeypatch.setitem(fish_linear.CHUNK_STATES, "cpu", 1 << 14)
    question = Question(16, 1031, num_heads=4, batch_size=3, is_causal=True)
    _, found, measured = made("glfish", question, True, measured=True)
    assert found == pytest.approx(measured, abs=1024)


@pytest.mark.parametrize("name", mostly_slow(["smgk", "fish", "linear"], ["smgk"]))
def test_kernels_are_counted_with_what_they_make_inside(name, monkeypatch):
    """The room of a kernel's backward is beyond what its operator returns."""
    pytest.importorskip("triton")
    question = Question(64, 2048, 4, 2, device="h200")
    backend, found = made(name, question, True, measured=False)
    assert backend == "triton"
    monkeypatch.setattr(layers, "IMPLEMENTATIONS", {})
    assert made(name, question, True, measured=False)[1] < found


def test_nothing_is_compiled_to_answer(monkeypatch):
    def load():
        raise AssertionError("the library was loaded")

    for place in ("kernels.cpu.draws", "kernels.cpu.selftest"):
        monkeypatch.setattr(f"lit_probattn.{place}.load", load)
    failure.cache_clear()
    assert answer("smgk", SMALL).problem is None


@pytest.mark.parametrize("text", ["num_kv_heads: null", "bias: 'false'", "dropout: '0.2'"])
def test_a_file_is_the_layer_that_other_commands_build(text, tmp_path):
    """Words in quotation marks, and null, are values of the types of the class."""
    path = tmp_path / "mine.yaml"
    options = f"{{num_heads: 8, {text}}}"
    entry = f"{{class_path: lit_probattn.attention.SoftmaxAttention, init_args: {options}}}"
    path.write_text(f"model: {{init_args: {{attention: {entry}}}}}\n")
    found = answer(str(path), SMALL)
    assert found.problem is None
    assert found.parameters == lit_probattn.create(str(path), 32, 4).count_parameters()


def test_the_order_is_that_of_the_numbers():
    made = [
        Answer(name, "", {}, num_heads=1, parameters=p, macs=m, training_bytes=t, inference_bytes=1)
        for name, p, m, t in (("a", 3, 1, 2), ("b", 1, 2, 3), ("c", 2, 3, 1))
    ]
    made.append(Answer("lost", "", {}, problem="why"))
    for by, expected in (("memory", "cab"), ("operations", "abc"), ("parameters", "bca")):
        assert [each.name for each in ranked(made, by)] == [*expected, "lost"]
    lines = table(ranked(made, "memory"))
    assert [line.split()[:2] for line in lines[1:4]] == [["1", "c"], ["2", "a"], ["3", "b"]]
    assert lines[-1] == "not available: lost: why"


def test_what_is_shown_can_be_used(few, capsys):
    words = ["ask", "--embed_dim", "32", "--seq_len", "64", "--num_heads", "4", "--json"]
    assert main(words[1:]) == 0
    for each in json.loads(capsys.readouterr().out)["attention"]:
        space: dict = {}
        exec("\n".join(each["uses"]["python"]), space)
        layer = space["layer"]
        assert (layer.num_heads, layer.head_dim, layer.dropout) == (each["num_heads"], 8, 0.1)
        written = yaml.safe_load("\n".join(each["uses"]["yaml"]))["model"]["init_args"]
        assert written["attention"] == {
            "class_path": each["class_path"],
            "init_args": each["options"],
        }
        assert (written["embed_dim"], written["head_dim"]) == (32, 8)


@pytest.mark.slow
def test_times_are_those_of_a_sweep_at_these_sizes(few, tmp_path, capsys):
    sweep, results = tmp_path / "ask.yaml", tmp_path / "results"
    words = ["--embed_dim", "16", "--seq_len", "8", "--num_heads", "2", "--batch", "1"]
    assert main([*words, "--write_sweep", str(sweep)]) == 0
    told = capsys.readouterr().out
    assert "Time: not measured for these sizes on cpu" in told
    assert f"lit-probattn sweep --config {sweep} --out" in told
    assert set(load_sweep(sweep).variants) == {"softmax", "mgk"}
    assert profiling_main(["sweep", "--config", str(sweep), "--out", str(results)]) == 0
    capsys.readouterr()
    assert main([*words, "--measured", str(results), "--sort", "time", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["attention"]
    assert all(each["training_s"] > 0 and each["inference_s"] > 0 for each in found)
    assert found[0]["training_s"] <= found[1]["training_s"]
    assert main([*words, "--measured", str(results), "--dropout", "0.2"]) == 0
    assert f"{results} has no times for these sizes on cpu" in capsys.readouterr().out
    assert main([*words, "--measured", str(results), "--device", "h200"]) == 0
    assert "has no times for these sizes on h200" in capsys.readouterr().out


def test_small_numbers_are_not_zero_and_given_flags_are_not_asked_for(few, tmp_path, capsys):
    sweep = str(tmp_path / "mine.yaml")
    assert (
        main(["--embed_dim", "16", "--seq_len", "8", "--batch", "1", "--write_sweep", sweep]) == 0
    )
    told = capsys.readouterr().out
    assert " 0.01 M " in told
    assert " 0.00 " not in told
    assert " 0 MiB " not in told
    assert "add --write_sweep" not in told
    assert f"lit-probattn sweep --config {sweep} --out" in told


def test_layers_of_middle_sizes_have_several_digits(few, capsys):
    assert main(["--embed_dim", "64", "--seq_len", "512", "--num_heads", "4", "--batch", "1"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("One attention layer of width 64: 1 sequence of 512 tokens, ")
    found = re.findall(r" (\S+) [MG]  +(\S+) MiB", shown)
    assert len(found) > 1
    assert all(len(re.sub(r"\D", "", number)) > 1 for row in found for number in row)
    assert not any(number.startswith("0.0") for row in found for number in row)


def test_times_of_other_sizes_are_no_order(few, tmp_path):
    claim_folder(config_of_times(), tmp_path, ROOT)
    rows = measure_point(make_plan(config_of_times(), tmp_path)[0])
    row_store(tmp_path / "rows.jsonl").add(*rows)
    words = ["--embed_dim", "16", "--seq_len", "9", "--num_heads", "2", "--batch", "1"]
    line = error_of([*words, "--measured", str(tmp_path), "--sort", "time"], main)
    assert f"--sort time: {tmp_path} has no times for these sizes" in line


@pytest.mark.parametrize("of_sweep", [False, True])
@pytest.mark.parametrize("asked", [False, True])
def test_times_of_another_mask_are_refused(few, of_sweep, asked, tmp_path, capsys):
    config = config_of_times()
    config.model.is_causal = of_sweep
    claim_folder(config, tmp_path, ROOT)
    row_store(tmp_path / "rows.jsonl").add(*measure_point(make_plan(config, tmp_path)[0]))
    words = ["--embed_dim", "16", "--seq_len", "8", "--num_heads", "2", "--batch", "1"]
    words += ["--measured", str(tmp_path), *(["--causal"] if asked else [])]
    assert main(words) == (0 if asked is of_sweep else 2)
    assert ("--causal" in capsys.readouterr().err) is (asked is not of_sweep)


@pytest.mark.parametrize("content", [None, "{", "[]", "{}"])
def test_times_without_the_sweep_that_measured_them_are_refused(few, content, tmp_path, capsys):
    rows = measure_point(make_plan(config_of_times(), tmp_path)[0])
    row_store(tmp_path / "rows.jsonl").add(*rows)
    if content is not None:
        (tmp_path / "sweep.json").write_text(content)
    test_what_is_wrong_is_one_line([*SIZES, "--measured", str(tmp_path)], "sweep.json", capsys)


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A10", "a10"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA GeForce RTX 4090", "rtx"),
        ("Tesla T4", "t4"),
    ],
)
def test_times_are_those_of_the_gpu_that_is_named(name, model, tmp_path):
    row, *_ = measure_point(make_plan(config_of_times(), tmp_path)[0])
    row = row.model_copy(update={"device": "cuda", "device_name": name})
    mine = Answer("", row.attention_class, json.loads(row.attention_args), num_heads=2)
    questions = [Question(16, 8, 4, batch_size=1, device=device) for device in GPUS]
    timed = [with_times([mine], [row], question)[0].training_s for question in questions]
    assert [gpu for gpu, seconds in zip(GPUS, timed, strict=True) if seconds] == [model]


def config_of_times():
    grid = {"embed_dim": [16], "seq_len": [8], "mode": ["train"], "backend": ["auto"]}
    return small_sweep(measure=["time"], grid=grid)


SIZES = ["--embed_dim", "32", "--seq_len", "64"]
OF_A_LAYER = [
    *(["--embed_dim", "32"], ["--num_heads", "4"], ["--batch", "2"], ["--dropout", "0.2"]),
    *(["--causal"], ["--equal_heads"], ["--device", "h200"], ["--sort", "time"]),
    *(["--attention", "mgk"], ["--use", "mgk"], ["--measured", "a"]),
    ["--num_heads", "8"],  # the default
]
OF_A_MODEL = [["--heads", "0.25"], ["--swap", "smgk"], ["--heads", "0.5"], ["--swap", "mgk"]]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ["--embed_dim", "512", "--seq_len", "9", "--num_heads", "7"],
            "the nearest divisor is 8",
        ),
        (
            ["--embed_dim", "512"],
            "--seq_len is missing: ",
        ),
        (["--embed_dim", "0", "--seq_len", "9"], "--embed_dim must be at least 1, received 0"),
        ([*SIZES, "--device", "h20"], "unknown device 'h20'; did you mean 'h200'?"),
        ([*SIZES, "--sort", "memry"], "unknown order 'memry'; did you mean 'memory'?"),
        ([*SIZES, "--dropout", "1"], "--dropout must be in [0, 1), received 1.0"),
        ([*SIZES, "--use", "smgkk"], "unknown attention 'smgkk'; did you mean 'smgk'?"),
        (
            [*SIZES, "--sort", "time", "--attention", "softmax"],
            "--sort time: there are no times for these sizes on cpu",
        ),
        ([*SIZES, "--batch", "-1"], "--batch must be at least 1, received -1"),
        (["--embed_dim", "32", "--seq_len", str(10**15)], "--seq_len must be at most 1048576"),
        (["--embed_dim", str(10**15), "--seq_len", "9"], "--embed_dim must be at most 1048576"),
        ([*SIZES, "--attention", "smgkk"], "unknown attention 'smgkk'; did you mean 'smgk'"),
        (["--model", "vit", "--write_sweep", "a.yaml"], "--model does not support --write_sweep"),
        ([*SIZES, "--measured", "nowhere"], "--measured nowhere: missing rows.jsonl"),
        *((["--model", "timm:vit", *words], words[0]) for words in OF_A_LAYER),
        *(([*SIZES, *words], f"{words[0]} requires --model") for words in OF_A_MODEL),
        (["--model", "vit"], "expected timm:NAME or hf:TYPE"),
        (["--model", "timm:vit_smal_patch16_224"], "did you mean 'vit_small_patch16_224'?"),
    ],
)
def test_what_is_wrong_is_one_line(words, expected, capsys):
    assert main(words) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert expected in told.err
    assert told.err.startswith("error: ")
    assert told.err.count("\n") == 1


def test_a_length_is_at_least_one():
    words = ["--model", "timm:vit", "--seq_len", "-3"]
    assert "argument --seq_len: must be at least 1, received -3" in error_of(words, main)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("hf:brt", "--model hf:brt: unknown model; did you mean 'b"),
        ("hf:wav2vec2", "--model hf:wav2vec2: supports models of token ids or images; its inputs"),
        ("hf:t5-small", "did you mean 't5'? expected a model type of transformers, such as ba"),
    ],
)
def test_an_unknown_type_of_transformers_is_one_line(name, expected, capsys):
    pytest.importorskip("transformers")
    test_what_is_wrong_is_one_line(["--model", name], expected, capsys)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layers", "width"), [("timm:vit_tiny_patch16_224", 12, 192)])
def test_a_model_by_name(name, layers, width, capsys):
    assert main(["--model", name, "--swap", "mgk", "--heads", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["layers"]
    assert len(found) == layers
    tokens = 197
    for each in found:
        assert each["action"] == "swapped"
        before, after = each["macs"]
        pairs = tokens * tokens * width
        assert before == 4 * tokens * width * width + 2 * pairs
        assert after - before >= tokens * width * width + pairs  # a second key of every head
        assert each["parameters"][1] > each["parameters"][0]


@pytest.mark.slow
def test_a_model_that_keeps_tensors_of_an_evaluation():
    """TinyViT keeps its position biases, which have gradients and therefore cannot be copied."""
    found, _ = changes("timm:tiny_vit_5m_224", "mgk", 1.0, 64)
    assert len(found) == 10
    assert all(after > before > 0 for _, (before, after) in found)


def test_multiply_adds_are_counted_without_a_copy_of_the_weights(monkeypatch):
    def refused(self, memo):
        raise MemoryError

    monkeypatch.setattr(nn.Parameter, "__deepcopy__", refused)
    model = nn.Sequential(nn.Linear(3, 5))
    assert models._macs(model, torch.ones(2, 3))["0"] == 2 * 3 * 5


def test_an_output_projection_outside_the_layer_is_counted(monkeypatch, capsys):
    """BERT's is in the next module."""
    pytest.importorskip("transformers")
    tokens, width = 16, 24
    monkeypatch.setitem(models._REDUCED, "hidden_size", width)
    assert main(["--model", "hf:bert", "--seq_len", str(tokens), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["sizes"].startswith("default sizes of bert; two of its 12 identical layers")
    weights, maps, half = tokens * width * width, tokens * tokens * width, width // 2
    for each in found["layers"]:
        # Half the heads: a query, two keys, a value and an output; two scores and a mean.
        assert each["macs"] == [4 * weights + 2 * maps, (5 * weights + 3 * maps) // 2]
        after = 4 * half * (width + 1) + width * (half + 1) + 2 * 6
        assert each["parameters"] == [4 * width * (width + 1), after]
    more = ("--swap", "smgk", "--heads", "1", "--json")
    assert main(["--model", "hf:bert", "--seq_len", str(tokens), *more]) == 0
    for each in json.loads(capsys.readouterr().out)["layers"]:
        assert each["macs"] == [4 * weights + 2 * maps, 4 * weights + 3 * maps]
        assert each["parameters"][0] == 4 * width * (width + 1)


def test_only_swapped_layers_are_summed(monkeypatch, capsys):
    """The row of a layer that is kept has no numbers."""
    swapped = LayerReport("a", "Attention", "swapped", (4, 2), parameters=(8, 5))
    found = [(swapped, (3_000_000, 2_000_000)), (LayerReport("b", "Gate", "kept: x"), (7, 7))]
    monkeypatch.setitem(vars(models), "changes", lambda *_: (found * 2, "small"))
    assert main(["--model", "hf:bert"]) == 0
    told = capsys.readouterr().out
    assert "swapped layers: parameters 16 -> 10, multiply-adds 6.00 M -> 4.00 M.\n" in told


def test_a_view_of_a_parameter_may_be_the_input_of_a_module():
    """As in timm's CaiT."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token, self.layer = nn.Parameter(torch.ones(1, 3)), nn.Linear(3, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(self.token.expand(2, -1)) + x.sum()

    assert models._macs(Model(), torch.ones(2))["layer"] == 2 * 3 * 5


@pytest.mark.parametrize("name", mostly_slow(TESTED, ["gpt2", "bart"]))
def test_types_of_transformers_by_name(name, monkeypatch):
    """Each has two layers, a model of two halves three kinds of them; only attention is counted.

    BART reads values of its inputs, so it is counted on zeros and not on the meta device.
    """
    pytest.importorskip("transformers")
    monkeypatch.setitem(models._REDUCED, "d_model", 64)
    found, told = changes(f"hf:{name}", "softmax", 1.0, 16)
    assert len(found) == {"t5": 6, "bart": 6, "clip": 24}.get(name, 2)
    assert all(layer.swapped for layer, _ in found)
    assert all(before == after > 0 for layer, _ in found for before, after in [layer.parameters])
    assert all(before == after > 0 for _, (before, after) in found)
    assert "two of its" in told or name == "clip"
