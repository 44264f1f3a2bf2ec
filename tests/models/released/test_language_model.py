"""The language model's pre-norm as released, written out in float64: outputs and every gradient."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from lit_probattn.attention import MGKAttention, SoftmaxAttention
from lit_probattn.models.decoding import generate
from lit_probattn.models.language_model import LanguageModel
from lit_probattn.models.released.language_model import ReleasedLanguageModel
from lit_probattn.tasks import ReleasedLanguageModeling
from tests.datamodules.text import made as made_text
from tests.support.by_hand import attend, layer_norm, mlp
from tests.support.runs import arguments, newest_state, only_version, run

VOCAB, LONGEST, WIDTH, HEAD, HEADS = 19, 13, 10, 7, 3
SIZES = {"vocab_size": VOCAB, "max_seq_len": LONGEST, "embed_dim": WIDTH, "head_dim": HEAD}
SIZES |= {"num_layers": 3, "mlp_dim": 11, "dropout": 0.0, "output": "full"}
softmax = partial(SoftmaxAttention, num_heads=HEADS)
PRE_NORM = pytest.mark.parametrize("pre_norm", ["keys", "residual"])


def made(attention=softmax, **options):
    torch.manual_seed(1)
    model = ReleasedLanguageModel(attention, **{**SIZES, **options}).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.5)
    return model


def oracle(model, inputs, pre_norm):
    length = inputs.shape[1]
    x = model.tokens.weight[inputs] * WIDTH**0.5
    index = torch.arange(WIDTH // 2, dtype=torch.float64)
    position = torch.arange(length - 1, -1, -1, dtype=torch.float64)
    angle = position[:, None] / 10000 ** (2 * index / WIDTH)
    x = x + torch.cat([angle.sin(), angle.cos()], -1)
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
    for block in model.encoder.blocks:
        normed = layer_norm(x, block.norm1)
        if pre_norm == "keys":
            x = x + attend(block.attention, x, normed, hidden)
        else:
            x = normed + attend(block.attention, normed, normed, hidden)
        x = x + mlp(block.mlp, layer_norm(x, block.norm2), torch.relu)
    return x  # no final norm


@PRE_NORM
@pytest.mark.parametrize("checkpointing", [False, True])
def test_it_equals_the_blocks_written_out(pre_norm, checkpointing):
    model = made(pre_norm=pre_norm, activation_checkpointing=checkpointing)
    inputs = torch.randint(0, VOCAB, (2, 11))
    found, expected = model(inputs), oracle(model, inputs, pre_norm)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)
    names = [n for n, _ in model.named_parameters() if not n.startswith("output")]
    parameters = [p for n, p in model.named_parameters() if n in names]
    weight = torch.randn_like(found)
    for name, a, b in zip(
        names,
        *(torch.autograd.grad((out * weight).sum(), parameters) for out in (found, expected)),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")
    plain = LanguageModel(softmax, **SIZES, norm_first=True).double()
    missing = set(plain.state_dict()) - set(model.state_dict())
    assert missing == {"encoder.norm.weight", "encoder.norm.bias"}
    plain.load_state_dict(model.state_dict(), strict=False)
    assert (plain(inputs) - found).abs().max() > 0.1


@PRE_NORM
def test_it_decodes_as_it_trains(pre_norm):
    """A cache keeps keys and values of normalised tokens, as the code's memory is normalised."""
    model = made(pre_norm=pre_norm).eval()
    prompt = torch.randint(0, VOCAB, (2, 4))
    tokens = generate(model, prompt, max_new_tokens=6).tokens
    for step in range(6):
        text = torch.cat([prompt, tokens[:, :step]], 1)
        hidden = model(text, positions=torch.arange(text.shape[1]).expand(2, -1))
        assert torch.equal(model.log_probs(hidden[:, -1]).argmax(-1), tokens[:, step])


def test_m_steps_count_every_query():
    soft = partial(MGKAttention, num_heads=2, e_step="soft")
    model = made(soft)
    inputs = torch.randint(0, VOCAB, (2, 11))
    model.train()(inputs)
    for block in model.encoder.blocks:
        count = block.attention.core.prior_statistics()[1]
        assert bool((count == 2 * 11 * 12 / 2).all())


@pytest.mark.slow
def test_the_shipped_task_trains(tmp_path):
    made_text.write(tmp_path)
    sizes = {"embed_dim": 16, "head_dim": 8, "num_layers": 2, "mlp_dim": 32, "cutoffs": "[20]"}
    sizes |= {"schedule_steps": 16, "warmup_steps": 4, "max_new_tokens": 8}
    data = {"corpus": "other", "segment_len": 16, "batch_size": 4, "vocab_size": "null"}
    words = [w for k, v in sizes.items() for w in (f"--model.init_args.{k}", str(v))]
    words += ["--trainer.max_steps", "2", "--trainer.val_check_interval", "2"]
    task = "as_released/wikitext103_small_pre_norm"
    run(arguments("fit", tmp_path, *words, task=task, data_dir=tmp_path, **data))
    state = newest_state(only_version(tmp_path))
    assert state["hyper_parameters"]["pre_norm"] == "keys"
    assert not any(name.startswith("model.encoder.norm") for name in state["state_dict"])


def test_norm_first_is_no_option_of_it():
    with pytest.raises(TypeError, match="norm_first"):
        ReleasedLanguageModeling(softmax, vocab_size=VOCAB, max_seq_len=LONGEST, norm_first=False)
    with pytest.raises(ValueError, match="pre_norm must be one of keys, residual"):
        ReleasedLanguageModel(softmax, **SIZES, pre_norm="queries")
