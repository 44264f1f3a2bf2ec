"""Every row that docs/reproduce.md lists builds, with the parameters that it states."""

from __future__ import annotations

import inspect

import pytest
import torch
import yaml

from lit_probattn.configs import attention_entry, attention_factory
from lit_probattn.models.language_model import LanguageModel
from tests.support.paths import ROOT

PAGE = (ROOT / "docs/reproduce.md").read_text(encoding="utf-8").splitlines()
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE
    if line.startswith("|") and line.count("|") == 8 and "---" not in line
][1:]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]}-{row[1]}-{row[2]}")
def test_row(row):
    _, _, task, attention, settings, _, layers = row
    entry = attention_entry(ROOT / f"configs/attention/{attention}.yaml")
    for setting in settings.split(", "):
        name, value = setting.split(" ")
        entry["init_args"][name] = yaml.safe_load(value)
    factory = attention_factory(entry["class_path"], entry["init_args"])
    config = yaml.safe_load(
        (ROOT / f"configs/tasks/wikitext103_{task}.yaml").read_text(encoding="utf-8")
    )
    known = inspect.signature(LanguageModel).parameters
    sizes = {k: v for k, v in config["model"]["init_args"].items() if k in known}
    data = config["data"]["init_args"]
    sizes |= {"vocab_size": data["vocab_size"], "max_seq_len": data["segment_len"]}
    depth, found = sizes.pop("num_layers"), []
    for num_layers in (1, 2):  # all layers are alike
        with torch.device("meta"):
            model = LanguageModel(factory, num_layers=num_layers, **sizes)
        found.append(sum(p.numel() for p in model.encoder.parameters()))
    assert found[0] + (depth - 1) * (found[1] - found[0]) == int(layers)


def test_every_row_of_the_tables_is_there():
    assert len(ROWS) >= 25  # a variant takes its row with it
