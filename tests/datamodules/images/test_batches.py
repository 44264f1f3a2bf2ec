"""Draws of pictures name seed, epoch and sample; mixing is the same in every layout."""

from __future__ import annotations

import random
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from datamodules.core.order import MicroSteps, TrainingOrder
from datamodules.images.batches import ImageCollate, Mixing, RequestOrder
from datamodules.images.samples import Request
from lit_probattn.base.errors import DataError
from tests.datamodules.images.made import imagenet, write_images

UNMIXED = {"mixup": 0.0, "cutmix": 0.0}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write_images(tmp_path / "data")


def test_augmentation_is_a_function_of_seed_epoch_and_sample(root: Path):
    train = imagenet(root).split("train")
    random.seed(1)
    first = train[Request(5, 2, 9)].image
    random.seed(2)
    torch.manual_seed(7)
    train[Request(4, 2, 9)]
    assert torch.equal(train[Request(5, 2, 9)].image, first)
    assert torch.equal(train[Request(5, 2, 10)].image, first)  # the step matters to mixing only
    for other in (train[Request(5, 3, 9)], imagenet(root, seed=1).split("train")[Request(5, 2, 9)]):
        assert not torch.equal(other.image, first)


@pytest.mark.parametrize("policy", ["rand-m9-mstd0.5-inc1", "original", "v0r"])
def test_posterize_to_no_bits_is_black(root: Path, policy: str):
    """Recent Pillow refuses what timm asks for when a drawn magnitude reaches its end."""
    from PIL import Image

    transform = imagenet(root, auto_augment=policy).split("train").transform
    (augment,) = (step for step in transform.transforms if "Augment" in type(step).__name__)
    operations = getattr(augment, "ops", None) or [o for p in augment.policy for o in p]
    found = [o.aug_fn for o in operations if o.name.startswith("Posterize")]
    assert found
    white = Image.new("RGB", (4, 4), "white")
    for function in found:
        assert function(white, 0).getextrema() == ((0, 0),) * 3
        assert function(white, 4).getextrema() == ((240, 240),) * 3


def test_drawing_leaves_the_global_generators_alone(root: Path):
    train = imagenet(root).split("train")
    before = random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()  # noqa: NPY002
    train[0]
    Mixing(0.8, 1.0, 1.0, 0.5, 0)(torch.zeros(4, 3, 8, 8), 3)
    assert random.getstate() == before[0]
    assert (np.random.get_state()[1] == before[1]).all()  # noqa: NPY002
    assert torch.equal(torch.get_rng_state(), before[2])


def same(first, second) -> bool:
    return all(torch.equal(first[name], second[name]) for name in first | second)


def micro_batches(data, rank: int, world_size: int, accumulation: int, start: int = 0):
    order = TrainingOrder(12, 4, 0, MicroSteps(rank, world_size, accumulation, lambda: start))
    split, collate = data.split("train"), data.collate()
    for requests in RequestOrder(order):
        yield collate([split[request] for request in requests])


@pytest.mark.parametrize(("world_size", "accumulation"), [(2, 1), (1, 2)])
def test_a_global_batch_is_drawn_and_mixed_alike_in_every_layout(root, world_size, accumulation):
    data = imagenet(root)
    whole = list(islice(micro_batches(data, 0, 1, 1), 5))
    ranks = [
        list(islice(micro_batches(data, rank, world_size, accumulation), 5 * accumulation))
        for rank in range(world_size)
    ]
    parts = [batch for together in zip(*ranks, strict=True) for batch in together]
    for step, expected in enumerate(whole):
        pieces = parts[2 * step : 2 * step + 2]
        joined = {name: torch.cat([piece[name] for piece in pieces]) for name in expected}
        assert same(joined, expected), step


def test_a_resumed_stream_goes_on_where_it_stopped(root: Path):
    data = imagenet(root)
    whole = list(islice(micro_batches(data, 0, 1, 1), 6))
    later = list(islice(micro_batches(data, 0, 1, 1, start=4), 2))
    assert all(same(a, b) for a, b in zip(later, whole[4:], strict=True))


# ---- mixing ----------------------------------------------------------------------------------


def test_mixup_mixes_neighbours_by_the_weight_it_states():
    mixing = Mixing(0.8, 0.0, 1.0, 0.5, seed=3)
    pictures = torch.randn(6, 3, 8, 8)
    weights = []
    for step in range(4):
        mixed, own = mixing(pictures.clone(), step)
        partner = pictures.view(3, 2, 3, 8, 8).flip(1).flatten(0, 1)
        torch.testing.assert_close(mixed, own * pictures + (1 - own) * partner)
        weights.append(own)
    assert len(set(weights)) == 4
    assert 0 < min(weights) < max(weights) < 1


def test_cutmix_weighs_by_the_area_it_takes():
    mixing = Mixing(0.0, 1.0, 1.0, 0.5, seed=3)
    pictures = torch.arange(4.0)[:, None, None, None].expand(4, 3, 16, 16)
    for step in range(4):
        mixed, own = mixing(pictures.clone(), step)
        for row in range(4):
            kept = (mixed[row] == row).float().mean()
            taken = (mixed[row] == (row ^ 1)).float().mean()
            assert float(kept) == pytest.approx(own, abs=1e-6)
            assert float(kept + taken) == 1.0


def test_batches_state_partner_and_share(root: Path):
    """The share is the partner's: so much of its picture is in the mixed one."""
    data = imagenet(root, cutmix=0.0)
    requests = next(iter(RequestOrder(TrainingOrder(12, 4, 0))))
    samples = [data.split("train")[request] for request in requests]
    plain, mixed = ImageCollate()(samples), data.collate()(samples)
    assert "mix_target" not in plain
    partner = [1, 0, 3, 2]
    assert mixed["mix_target"].tolist() == plain["target"][partner].tolist()
    share = mixed["mix_weight"]
    assert share.dtype == torch.float32
    assert share.tolist() == [float(share[0])] * 4
    assert abs(float(share[0]) - 0.5) > 0.01
    expected = torch.lerp(plain["inputs"], plain["inputs"][partner], share.reshape(-1, 1, 1, 1))
    torch.testing.assert_close(mixed["inputs"], expected)
    assert "mix_target" not in next(iter(imagenet(root, **UNMIXED).train_dataloader()))


def test_odd_micro_batches_cannot_be_mixed(root: Path):
    with pytest.raises(DataError, match=r"micro-batch must be even: batch_size=3 .* gives 3"):
        imagenet(root, batch_size=3).train_dataloader()
    imagenet(root, batch_size=3, **UNMIXED).train_dataloader()
