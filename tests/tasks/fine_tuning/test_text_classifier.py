"""Classes of pairs: one sequence, what is logged and written, and that it learns."""

from __future__ import annotations

import pytest
import torch

from lit_probattn.tasks import QuestionAnswering, TextClassifier
from tests.datamodules.text.fine_tuning import made
from tests.datamodules.text.fine_tuning.test_pairs import data_of
from tests.tasks.tiny import softmax, trainer


@pytest.mark.parametrize("types", [0, 2])
def test_the_loss_is_that_of_the_model_with_its_types(types):
    torch.manual_seed(1)
    sizes = {"vocab_size": 13, "max_seq_len": 8, "embed_dim": 8, "head_dim": 4, "num_layers": 1}
    task = TextClassifier(softmax, num_classes=3, num_token_types=types, mlp_dim=8, **sizes)
    task = task.eval().double()
    batch = {
        "inputs": torch.randint(13, (2, 8)),
        "key_mask": torch.ones(2, 8, dtype=torch.bool),
        "token_types": (torch.arange(8) > 3).long().expand(2, 8),
        "target": torch.tensor([2, 0]),
        "sample_ids": torch.arange(2),
    }
    more = {"token_types": batch["token_types"]} if types else {}
    logits = task.model(batch["inputs"], key_mask=batch["key_mask"], **more)
    expected = -sum(logits.log_softmax(-1)[row, target] for row, target in enumerate((2, 0))) / 2
    torch.testing.assert_close(task.batch_loss(batch), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("kind", "options"), [(TextClassifier, {"num_classes": 3}), (QuestionAnswering, {})]
)
def test_defaults_are_those_of_bert(kind, options):
    """Devlin et al., 2019, appendix A.3: fine-tuning; its released code: the norms' epsilon."""
    sizes = {"vocab_size": 13, "max_seq_len": 8, "embed_dim": 8, "head_dim": 4, "num_layers": 1}
    task = kind(softmax, mlp_dim=8, **sizes, **options)
    expected = {"dropout": 0.1, "attention_dropout": 0.1, "weight_decay": 0.01, "lr": 3e-5}
    expected |= {"schedule": "linear", "norm_eps": 1e-12, "num_token_types": 2}
    assert {name: task.hparams[name] for name in expected} == expected


def test_mismatched_is_predicted(tmp_path):
    data = data_of(made.write_mnli(tmp_path / "text"), "mnli")
    sizes = {"vocab_size": data.vocab_size, "max_seq_len": data.max_seq_len, "mlp_dim": 8}
    task = TextClassifier(softmax, num_classes=3, embed_dim=8, head_dim=4, num_layers=1, **sizes)
    found = [x for batch in trainer().predict(task, data) for x in batch["target"].tolist()]
    assert found == [n % 3 for n in range(200, 209) if n != 201]
