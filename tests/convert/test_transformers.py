"""BERT and RoBERTa: the same logits and gradients as transformers', there and back."""

from __future__ import annotations

import argparse
import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.func import functional_call

from lit_probattn.__main__ import main
from lit_probattn.attention import SoftmaxAttention
from lit_probattn.convert.from_transformers import Imported, convert, import_folder
from lit_probattn.convert.transformers_files import read_json, read_weights
from lit_probattn.models.masked_language_model import MaskedLanguageModel
from lit_probattn.models.text_encoder import TextEncoder
from lit_probattn.training.checkpoints import find_file, load_checkpoint
from lit_probattn.training.trained import open_trained
from tests.bad_inputs.cases import command_error
from tests.datamodules.text import made as made_text
from tests.datamodules.text.made import encoder
from tests.support.helpers import error_of
from tests.support.paths import ROOT
from tests.support.runs import arguments, only_version, run

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers")

B, N, V, C, H, INNER, T, LABELS = 3, 11, 37, 15, 3, 13, 3, 5
SIZES = {
    "vocab_size": V,
    "hidden_size": C,
    "num_hidden_layers": 2,
    "num_attention_heads": H,
    "intermediate_size": INNER,
    "type_vocab_size": T,
    "num_labels": LABELS,
    "layer_norm_eps": 3e-3,  # so large that another one shows
}
CLASSES = (
    *("BertModel", "BertForMaskedLM", "BertForPreTraining"),
    *("BertForQuestionAnswering", "BertForSequenceClassification"),
    *("RobertaModel", "RobertaForMaskedLM"),
    *("RobertaForQuestionAnswering", "RobertaForSequenceClassification"),
)
POOLER = {"weight": (C, C), "bias": (C,)}
PADDING = 4  # of RoBERTa: an id that no real token has


def theirs(name: str, **changed: Any) -> Any:
    """A model of transformers with random weights, biases and norms."""
    bert = name.startswith("Bert")
    own = {"max_position_embeddings": 17, "pad_token_id": 0 if bert else PADDING}
    kind = transformers.BertConfig if bert else transformers.RobertaConfig
    torch.manual_seed(3)
    labels = {} if name.endswith("Classification") else {"num_labels": 2}
    config = kind(**{**SIZES, **labels, **own, **changed})
    model = getattr(transformers, name)(config).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, mean=0.1, std=0.4)
    return model


class Ours(nn.Module):
    """An encoder and the heads that the file has; for these classes by hand."""

    def __init__(self, found: Imported) -> None:
        super().__init__()
        sizes = {k: v for k, v in found.sizes.items() if k != "num_classes"}
        attention = partial(SoftmaxAttention, num_heads=found.num_heads)
        kind = MaskedLanguageModel if "words" in found.layout.parts else TextEncoder
        self.model: Any = kind(attention, **sizes)
        for name in ("pooler", "next_sentence", "spans", "classifier"):
            if f"{name}.weight" in found.state:
                setattr(self.model, name, nn.Linear(*found.state[f"{name}.weight"].shape[::-1]))
        self.model.load_state_dict(found.state)

    def forward(self, inputs: Tensor, mask: Tensor, types: Tensor) -> dict[str, Tensor]:
        m = self.model
        hidden = m.encode(inputs, key_mask=mask, token_types=types)
        out = {"last_hidden_state": hidden}
        if getattr(m, "pooler", None) is not None:
            out["pooler_output"] = pooled = m.pooler(hidden[:, 0]).tanh()
        if hasattr(m, "head"):
            logits = m.head(hidden) @ m.tokens.weight.T + m.output.bias
            out["logits"] = out["prediction_logits"] = logits
        if getattr(m, "next_sentence", None) is not None:
            out["seq_relationship_logits"] = m.next_sentence(pooled)
        if hasattr(m, "spans"):
            out["start_logits"], out["end_logits"] = m.spans(hidden).unbind(-1)
        if hasattr(m, "classifier"):
            out["logits"] = m.classifier(pooled)
        return out


def batch(types: int = T) -> tuple[Tensor, Tensor, Tensor]:
    made = torch.Generator().manual_seed(5)
    mask = torch.arange(N) < torch.tensor([[N], [N - 4], [3]])
    inputs = torch.randint(PADDING + 1, V, (B, N), generator=made).where(mask, PADDING)
    return inputs, mask, torch.randint(types, (B, N), generator=made)


def real(name: str, value: Tensor, mask: Tensor) -> Tensor:
    """What is said of real tokens; of whole sequences everything."""
    return value[mask] if value.shape[:2] == mask.shape else value


def imported(model: Any, folder: Any) -> Imported:
    model.save_pretrained(folder)
    return convert(read_json(folder / "config.json"), read_weights(folder))


# ---- the same function -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("labels", "problem"),
    [(LABELS, "regression"), (LABELS, "multi_label_classification"), (1, "regression"), (1, None)],
)
@pytest.mark.parametrize("family", ["Bert", "Roberta"])
def test_a_classifier_of_something_else_than_one_class_is_refused(
    tmp_path, family, labels, problem
):
    """As transformers chooses the loss; one label without a problem type is a regression."""
    kind = f"{family}ForSequenceClassification"
    model = theirs(kind, num_labels=labels, problem_type=problem)
    with pytest.raises(ValueError, match="problem_type"):
        imported(model, tmp_path)
    others = theirs(f"{family}Model", problem_type=problem)  # of which it says nothing
    assert imported(others, tmp_path / "others").classes is None
    one_class = theirs(kind, problem_type="single_label_classification")
    assert imported(one_class, tmp_path / "one").sizes["num_classes"] == LABELS


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", CLASSES)
def test_outputs_are_those_of_transformers(name, dtype, tmp_path):
    model = theirs(name).to(dtype)
    ours = Ours(imported(model, tmp_path)).to(dtype).eval()
    inputs, mask, types = batch()
    with torch.no_grad():
        expected = model(input_ids=inputs, attention_mask=mask, token_type_ids=types)
        found = ours(inputs, mask, types)
    outputs = {key: value for key, value in expected.items() if isinstance(value, Tensor)}
    assert outputs
    atol = 1e-5 if dtype == torch.float32 else 1e-10
    for key, value in outputs.items():
        assert float(value.std()) > 0.03
        pair = real(key, found[key], mask), real(key, value, mask)
        torch.testing.assert_close(*pair, rtol=atol, atol=atol, msg=key)


@pytest.mark.parametrize("name", ["BertForPreTraining", "RobertaForSequenceClassification"])
def test_gradients_go_through_the_names(name, tmp_path):
    model = theirs(name).double()
    found = imported(model, tmp_path)
    ours = Ours(found).double().eval()
    inputs, mask, types = batch()
    expected = model(input_ids=inputs, attention_mask=mask, token_type_ids=types)
    for outputs in (expected, ours(inputs, mask, types)):
        logits = [outputs[key] for key in expected if "logits" in key]
        loss = sum(real("", x, mask).sin().sum() for x in logits)
        loss.backward()
    wanted = dict(model.named_parameters())
    gradients = {k: p.grad for k, p in ours.model.named_parameters()}
    seen = 0
    for mine, other in found.layout.names().items():
        grad = wanted[other].grad
        if mine == "positions.offsets.weight" and name.startswith("Roberta"):
            grad = grad[PADDING + 1 :]
        torch.testing.assert_close(gradients[mine], grad, rtol=1e-9, atol=1e-10, msg=mine)
        seen += float(grad.abs().max()) > 1e-6
    assert seen > 30


@pytest.mark.parametrize("name", ["BertForMaskedLM", "RobertaForQuestionAnswering"])
def test_dropout_acts_where_theirs_does(name, tmp_path):
    """On embeddings and both branches of every block, not after the MLP's activation."""
    options = {"hidden_dropout_prob": 0.25, "attention_probs_dropout_prob": 0.0}
    model = theirs(name, **options)
    ours = Ours(imported(model, tmp_path)).train()
    inputs, mask, types = batch(1 if name.startswith("Roberta") else T)
    given = {"input_ids": inputs, "attention_mask": mask, "token_type_ids": types}

    def shapes(module: Any, call: Any) -> list[tuple[int, ...]]:
        found: list[tuple[int, ...]] = []
        for part in module.modules():
            if isinstance(part, nn.Dropout) and part.p == 0.25:
                part.register_forward_hook(lambda *x: found.append(tuple(x[2].shape)))
        call()
        return found

    expected = shapes(model.train(), lambda: model(**given))
    assert len(expected) == 1 + 2 * SIZES["num_hidden_layers"]
    assert shapes(ours, lambda: ours(inputs, mask, types)) == expected


def test_relu_and_one_token_type(tmp_path):
    model = theirs("RobertaModel", hidden_act="relu", type_vocab_size=1)
    ours = Ours(imported(model, tmp_path)).eval()
    inputs, mask, types = batch(1)
    with torch.no_grad():
        expected = model(input_ids=inputs, attention_mask=mask).last_hidden_state
        torch.testing.assert_close(
            ours(inputs, mask, types)["last_hidden_state"][mask], expected[mask]
        )


# ---- files -------------------------------------------------------------------------------------


def written(folder: Any, name: str, **changed: Any) -> Any:
    model = theirs(name, **changed)
    model.save_pretrained(folder / "theirs")
    return model


@pytest.mark.parametrize("name", CLASSES)
def test_there_and_back_bit_for_bit(name, tmp_path, capsys):
    model = written(tmp_path, name)
    first, second = str(tmp_path / "theirs"), str(tmp_path / "back")
    assert main(["convert", "from_transformers", first, str(tmp_path / "x.ckpt")]) == 0
    assert main(["convert", "to_transformers", str(tmp_path / "x.ckpt"), second]) == 0
    assert f"{name}:" in capsys.readouterr().out
    before, after = (load_file(f"{place}/model.safetensors") for place in (first, second))
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        if key.endswith("position_embeddings.weight") and name.startswith("Roberta"):
            assert not after[key][: PADDING + 1].any()  # never read
            tensor[: PADDING + 1] = 0
        assert tensor.dtype == after[key].dtype
        assert torch.equal(tensor, after[key]), key
    old, new = (read_json(Path(place) / "config.json") for place in (first, second))
    if name.endswith("Classification"):  # the default is written
        assert old.pop("classifier_dropout") is None
        assert new["classifier_dropout"] == old["hidden_dropout_prob"]
    assert {key: new[key] for key in old} == old
    again, told = getattr(transformers, name).from_pretrained(second, output_loading_info=True)
    assert not any(told[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    inputs, mask, types = batch()
    given = {"input_ids": inputs, "attention_mask": mask, "token_type_ids": types}
    with torch.no_grad():
        for a, b in zip(model(**given).values(), again.eval()(**given).values(), strict=True):
            torch.testing.assert_close(real("", a, mask), real("", b, mask), rtol=0, atol=0)


def test_a_checkpoint_opens_with_its_configuration(tmp_path):
    model = written(tmp_path, "BertForMaskedLM")
    import_folder(tmp_path / "theirs", tmp_path / "x.ckpt")
    task = ROOT / "configs/tasks/tiny/masked_lm.yaml"
    wanted = {"checkpoint": tmp_path / "x.ckpt", "config": [task, tmp_path / "x.yaml"]}
    options = argparse.Namespace(**wanted, data=[], device="cpu")
    opened = open_trained(options, with_data=False).task
    assert opened.hparams["max_seq_len"] == 17
    inputs, mask, types = batch()
    with torch.no_grad():
        hidden = opened.model(inputs, key_mask=mask, token_types=types)
        target = inputs.where(mask, -100)
        given = {"input_ids": inputs, "attention_mask": mask, "token_type_ids": types}
        logits = model(**given).logits[mask]
        losses = opened.model.token_losses(hidden, target)
        expected = nn.functional.cross_entropy(logits, inputs[mask], reduction="none")
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-5)


def test_an_imported_checkpoint_becomes_mgk(tmp_path):
    written(tmp_path, "BertForMaskedLM", num_attention_heads=4, hidden_size=12)
    import_folder(tmp_path / "theirs", tmp_path / "x.ckpt")
    words = ["convert", str(tmp_path / "x.ckpt"), str(tmp_path / "mgk.ckpt"), "--weights_only"]
    assert main(words) == 0
    state = load_checkpoint(tmp_path / "mgk.ckpt")["state_dict"]
    assert any("prior" in key for key in state)


def test_a_pooler_beside_masked_words_is_kept_apart(tmp_path, capsys):
    """As in the published file of roberta-base, whose class has no place for it."""
    written(tmp_path, "RobertaForMaskedLM")
    path = tmp_path / "theirs/model.safetensors"
    pooler = {f"roberta.pooler.dense.{x}": torch.ones(*s) for x, s in POOLER.items()}
    save_file({**load_file(path), **pooler}, path)
    words = ["convert", "from_transformers", str(path.parent), str(tmp_path / "x.ckpt")]
    assert main(words) == 0
    assert (
        "stored apart, since masked language models here lack them: pooler"
        in capsys.readouterr().out
    )
    checkpoint = load_checkpoint(tmp_path / "x.ckpt")
    apart = checkpoint["transformers"]["other_heads"]
    assert set(apart) == {"model.pooler.weight", "model.pooler.bias"}
    assert not apart.keys() & checkpoint["state_dict"].keys()
    words = ["convert", "to_transformers", str(tmp_path / "x.ckpt"), str(tmp_path / "out")]
    assert main(words) == 0
    assert "omitted, since this class lacks them: pooler" in capsys.readouterr().out
    assert not any("pooler" in key for key in load_file(tmp_path / "out/model.safetensors"))


def old_names(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same weights as files of 2019 have them."""
    pairs = ("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta")
    for new, old in pairs:
        state = {key.replace(new, old): tensor for key, tensor in state.items()}
    state["bert.embeddings.position_ids"] = torch.arange(17)[None]
    state["cls.predictions.decoder.weight"] = state["bert.embeddings.word_embeddings.weight"]
    state["cls.predictions.decoder.bias"] = state["cls.predictions.bias"]
    return state


def test_weights_that_are_nan_are_not_imported(tmp_path):
    model = written(tmp_path, "BertForPreTraining")
    with torch.no_grad():
        model.cls.predictions.bias[3] = torch.nan
    model.save_pretrained(tmp_path / "theirs")
    out = tmp_path / "x.ckpt"
    line = error_of(["convert", "from_transformers", str(tmp_path / "theirs"), str(out)])
    assert "model.safetensors: cls.predictions" in line
    assert not out.exists()


@pytest.mark.parametrize("form", ["bin", "sharded", "sharded bin"])
def test_every_form_of_file(form, tmp_path):
    model = written(tmp_path, "BertForPreTraining")
    folder = tmp_path / "theirs"
    new = convert(read_json(folder / "config.json"), read_weights(folder)).state
    (folder / "model.safetensors").unlink()
    state = old_names({k: v.clone() for k, v in model.state_dict().items() if "decoder" not in k})
    parts = [dict(list(state.items())[i::2]) for i in range(2)]
    ending = "bin" if form.endswith("bin") else "safetensors"
    stem = "pytorch_model" if ending == "bin" else "model"
    save = torch.save if ending == "bin" else save_file
    if form == "bin":
        save(state, folder / "pytorch_model.bin")
    else:
        names = [f"{stem}-0000{i + 1}-of-00002.{ending}" for i in range(2)]
        for name, part in zip(names, parts, strict=True):
            save({key: tensor.clone() for key, tensor in part.items()}, folder / name)
        where = {key: name for name, part in zip(names, parts, strict=True) for key in part}
        text = json.dumps({"weight_map": where})
        (folder / f"{stem}.{ending}.index.json").write_text(text)
    old = convert(read_json(folder / "config.json"), read_weights(folder)).state
    assert old.keys() == new.keys()
    assert all(torch.equal(old[key], new[key]) for key in new)


def test_training_goes_on_from_imported_weights_and_its_model_goes_back(tmp_path):
    written(tmp_path, "BertForMaskedLM", vocab_size=60)
    import_folder(tmp_path / "theirs", tmp_path / "x.ckpt")
    text = made_text.write(tmp_path / "text")
    own = encoder(made_text.lines(60, 0), tmp_path / "theirs", 60)
    words = ("--ckpt_path", str(tmp_path / "x.ckpt"), "--model.init_args.lr", "1e-7")
    given = {"data_dir": text, "vocab_size": 60, "tokenizer": tmp_path / "theirs"}
    given |= {"segment_len": 17, "attention": str(tmp_path / "x.yaml")}
    short = ("--trainer.max_steps", "1")
    run(arguments("fit", tmp_path, *words, *short, task="tiny/masked_lm", **given))
    folder = only_version(tmp_path)
    trained = load_checkpoint(find_file(folder / "last"))
    assert trained["hyper_parameters"]["mask_token"] == own.mask
    assert main(["convert", "to_transformers", str(folder / "last"), str(tmp_path / "out")]) == 0
    before, after = (load_file(tmp_path / f"{x}/model.safetensors") for x in ("theirs", "out"))
    assert before.keys() == after.keys()
    steps = [float((after[key] - before[key]).abs().max()) for key in before]
    assert 0 < max(steps) < 1e-5
    config = read_json(tmp_path / "out/config.json")
    assert config["num_attention_heads"] == H
    assert config["layer_norm_eps"] == 3e-3


# ---- trained by ourselves ----------------------------------------------------------------------


def own_checkpoint(
    folder: Any, attention: dict[str, Any] | None = None, **changed: Any
) -> list[str]:
    """A masked language model of ours, as a run writes it, and the words that export it."""
    sizes = {"embed_dim": 12, "head_dim": 4, "num_layers": 2, "mlp_dim": INNER, "max_seq_len": N}
    sizes |= {"vocab_size": V, "norm_eps": 3e-3, **changed}
    model = MaskedLanguageModel(partial(SoftmaxAttention, num_heads=3), **sizes)
    for parameter in model.parameters():
        nn.init.normal_(parameter, mean=0.1, std=0.4)
    state = {f"model.{key}": tensor for key, tensor in model.state_dict().items()}
    path = folder / "step-00000001.ckpt"
    torch.save({"state_dict": state, "hyper_parameters": sizes, "global_step": 1}, path)
    entry = {"class_path": "lit_probattn.attention.SoftmaxAttention", "init_args": {"num_heads": 3}}
    entry = attention or entry
    text = yaml.safe_dump({"model": {"init_args": {"attention": entry}}})
    path.with_suffix(".yaml").write_text(text)
    return ["convert", "to_transformers", str(path), str(folder / "out")]


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_a_model_of_our_own_is_written(family, tmp_path, capsys):
    words = own_checkpoint(tmp_path)
    assert main([*words, "--model_type", family]) == 0
    assert ("tokens of id 1 no position" in capsys.readouterr().out) == (family == "roberta")
    kind = transformers.BertForMaskedLM if family == "bert" else transformers.RobertaForMaskedLM
    model, told = kind.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(told[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    found = convert(read_json(tmp_path / "out/config.json"), read_weights(tmp_path / "out"))
    state = load_checkpoint(tmp_path / "step-00000001.ckpt")["state_dict"]
    for key, tensor in state.items():
        assert torch.equal(found.state[key.removeprefix("model.")], tensor)
    assert not found.state["token_types.weight"].any()
    inputs, mask, _ = batch(1)
    sizes = load_checkpoint(tmp_path / "step-00000001.ckpt")["hyper_parameters"]
    ours = MaskedLanguageModel(partial(SoftmaxAttention, num_heads=3), **sizes).eval()
    own = {key.removeprefix("model."): tensor for key, tensor in state.items()}
    with torch.no_grad():
        hidden = functional_call(ours, own, (inputs,), {"key_mask": mask})
        logits = hidden @ own["tokens.weight"].T + own["output.bias"]
        expected = model.eval()(input_ids=inputs, attention_mask=mask).logits
    torch.testing.assert_close(logits[mask], expected[mask], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("init_args", "said"),
    [
        ({"rotary_dim": 2}, "positions are rotary"),
        ({"value_head_dim": 3}, "value_head_dim is 3"),
    ],
)
def test_attention_that_has_no_place_there_is_refused(init_args, said, tmp_path):
    name = "lit_probattn.attention.SoftmaxAttention"
    entry = {"class_path": name, "init_args": {"num_heads": 3, **init_args}}
    assert said in command_error(own_checkpoint(tmp_path, entry))


def test_missing_and_unexpected_names_are_told_with_the_nearest(tmp_path):
    written(tmp_path, "BertForMaskedLM")
    path = tmp_path / "theirs/model.safetensors"
    state = load_file(path)
    stem = "bert.encoder.layer.1.attention.self"
    state[f"{stem}.queries.weight"] = state.pop(f"{stem}.query.weight")
    save_file(state, path)
    words = ["convert", "from_transformers", str(path.parent), str(tmp_path / "x.ckpt")]
    assert command_error(words) == (
        f"error: missing: {stem}.query.weight (near '{stem}.queries.weight'); "
        f"unexpected: {stem}.queries.weight (near '{stem}.query.weight')"
    )


def test_the_command_without_a_word_is_still_that_of_mgk(tmp_path):
    assert "checkpoint not found" in command_error(["convert", str(tmp_path / "a.ckpt"), "b.ckpt"])
