"""State dicts of other programs: errors name the fault and the remedy."""

import pytest
import torch
from torch import nn

from lit_probattn.base.errors import ConfigError
from lit_probattn.interop.state_dicts import read_state_dict


def test_a_folder_is_not_reported_as_missing(tmp_path):
    with pytest.raises(ConfigError, match="is a folder, expected a file of tensors by name"):
        read_state_dict(tmp_path)


def test_a_module_must_be_saved_as_its_state_dict(tmp_path):
    torch.save(nn.Linear(2, 3), tmp_path / "model.pt")
    with pytest.raises(ConfigError, match=r"requires code .*; save its state_dict\(\) instead"):
        read_state_dict(tmp_path / "model.pt")
