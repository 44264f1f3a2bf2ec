"""Loaders: batches, workers, ranks, and resuming under a Lightning trainer."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

import datamodules
from datamodules import Synthetic
from datamodules.core.base import DataModule
from datamodules.core.sequences import PadCollate, Sample
from lit_probattn.base.errors import ConfigError, DataError
from tests.support.fresh import fresh_python


def synthetic(**options) -> Synthetic:
    sizes = {"num_train": 53, "num_val": 21, "num_test": 19, "min_length": 5, "max_length": 23}
    data = Synthetic(**{**sizes, "batch_size": 8, "pad_multiple": 4, **options})
    data.setup()
    return data


def as_rank(data: Synthetic, rank: int, world_size: int, accumulation: int = 1) -> Synthetic:
    progress = SimpleNamespace(total=SimpleNamespace(processed=0))
    data.trainer = SimpleNamespace(  # type: ignore[assignment]
        global_rank=rank,
        world_size=world_size,
        accumulate_grad_batches=accumulation,
        max_steps=10,
        overfit_batches=0,
        strategy=SimpleNamespace(root_device=torch.device("cpu")),
        fit_loop=SimpleNamespace(epoch_loop=SimpleNamespace(batch_progress=progress)),
    )
    return data


def test_collate_pads_at_the_end() -> None:
    samples = [
        Sample(np.arange(1, 4), 7, 20),
        Sample(np.arange(1, 6), 2, -1),
    ]
    batch = PadCollate("longest", 4, 11)(samples)
    assert batch["inputs"].tolist() == [[1, 2, 3, 0, 0, 0, 0, 0], [1, 2, 3, 4, 5, 0, 0, 0]]
    assert batch["key_mask"].sum(1).tolist() == [3, 5]
    assert (batch["key_mask"] == (batch["inputs"] != 0)).all()
    assert batch["target"].tolist() == [7, 2]
    assert batch["sample_ids"].tolist() == [20, -1]
    assert {name: value.dtype for name, value in batch.items()} == {
        "inputs": torch.int64,
        "key_mask": torch.bool,
        "target": torch.int64,
        "sample_ids": torch.int64,
    }
    assert PadCollate("max", 4, 11)(samples)["inputs"].shape == (2, 11)
    assert PadCollate("longest", 7, 6)(samples)["inputs"].shape == (2, 6)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_evaluation_counts_each_sample_once(world_size: int) -> None:
    full = synthetic()
    seen: list[int] = []
    lengths = set()
    assert full.val_dataloader().loader.num_workers == 0
    for rank in range(world_size):
        loader = as_rank(synthetic(eval_batch_size=4), rank, world_size).val_dataloader()
        batches = list(loader)
        lengths.add(len(batches))
        assert len(loader) == len(batches)
        for batch in batches:
            real = batch["sample_ids"] >= 0
            seen += batch["sample_ids"][real].tolist()
            for row, sample in zip(batch["target"][real], batch["sample_ids"][real], strict=True):
                assert int(row) == full.split("val")[int(sample)].target
    assert sorted(seen) == list(range(21))
    assert len(lengths) == 1


def test_micro_batches_of_ranks_make_the_global_batch() -> None:
    whole = next(iter(synthetic().train_dataloader()))["sample_ids"].tolist()
    parts = []
    streams = [iter(as_rank(synthetic(), rank, 2, 2).train_dataloader()) for rank in range(2)]
    for _ in range(2):
        for stream in streams:
            parts += next(stream)["sample_ids"].tolist()
    assert parts == whole


def test_loaders_leave_the_global_generator_alone() -> None:
    data = synthetic()
    torch.manual_seed(5)
    next(iter(data.train_dataloader()))
    list(data.val_dataloader())
    after = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(after, torch.rand(3))


def test_synthetic_labels_follow_their_rule() -> None:
    data = synthetic(num_classes=5, vocab_size=13)
    for index in range(53):
        tokens, target, sample_id = data.split("train")[index]
        assert sample_id == index
        assert 5 <= len(tokens) <= 23
        markers = tokens[tokens <= 5]
        assert set(markers) == {target + 1}
        assert len(markers) == 1 + len(tokens) // 16
        assert tokens.max() < 13
    again = synthetic(num_classes=5, vocab_size=13).split("train")
    np.testing.assert_array_equal(again[52].values, data.split("train")[52].values)
    assert set(data.split("train").targets) == set(range(5))


def test_arguments_of_every_subclass_are_checked() -> None:
    class Ours(Synthetic):
        def __init__(self, order: Literal["up", "down"] = "up", **kwargs: Any) -> None:
            super().__init__(**kwargs)

    class OfOtherTypes(Synthetic):
        def __init__(self, extra: OfNoModule = None, **kwargs: Any) -> None:  # type: ignore  # noqa: F821
            super().__init__(**kwargs)

    with pytest.raises(ConfigError, match=r"^order must be one of up, down, received 'flat'$"):
        Ours("flat")
    with pytest.raises(ConfigError, match=r"^num_train must be at least 1, received 0$"):
        OfOtherTypes(num_train=0)
    assert OfOtherTypes(extra=1, seed=3).seed == Ours("down", seed=3).seed == 3
    for base in {base for name in datamodules.__all__ for base in getattr(datamodules, name).mro()}:
        init = vars(base).get("__init__") if issubclass(base, DataModule) else None
        while hasattr(init, "__signature__"):  # of `with_defaults`
            init = init.__wrapped__
        assert init is None or hasattr(init, "__wrapped__"), base


def test_folders_come_from_argument_then_environment(monkeypatch) -> None:
    monkeypatch.delenv("LIT_PROBATTN_DATA", raising=False)
    monkeypatch.delenv("LIT_PROBATTN_CACHE", raising=False)
    assert Synthetic().data_dir == Path("data")
    monkeypatch.setenv("LIT_PROBATTN_DATA", "/raw")
    assert Synthetic().data_dir == Path("/raw")
    monkeypatch.setenv("LIT_PROBATTN_CACHE", "/caches")
    data = Synthetic(data_dir="/other")
    assert (data.data_dir, data.cache_dir) == (Path("/other"), Path("/caches"))
    assert Synthetic(cache_dir="/c").cache_dir == Path("/c")


def test_caches_go_to_the_users_cache_folder(tmp_path, monkeypatch) -> None:
    monkeypatch.delenv("LIT_PROBATTN_CACHE")
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.delenv("XDG_CACHE_HOME")
    place = Synthetic(data_dir=str(tmp_path / "raw")).cache_dir
    assert place.parent == Path("/home/me/.cache/lit_probattn")
    assert place.name.startswith("raw-")
    monkeypatch.setenv("XDG_CACHE_HOME", "/scratch")
    assert Synthetic(data_dir=str(tmp_path / "raw")).cache_dir == (
        Path("/scratch/lit_probattn") / place.name
    )
    other = Synthetic(data_dir=str(tmp_path / "elsewhere/raw")).cache_dir
    assert other.name != place.name, "releases in two folders do not share caches"
    monkeypatch.chdir(tmp_path)
    assert Synthetic(data_dir="raw").cache_dir.name == place.name


@pytest.mark.parametrize("variable", ["LIT_PROBATTN_DATA", "LIT_PROBATTN_CACHE"])
def test_a_home_that_is_not_there_is_one_line(variable, monkeypatch) -> None:
    monkeypatch.setenv(variable, "~nobody_here/x")
    with pytest.raises(DataError, match=r"^~nobody_here/x: that user has no home folder"):
        Synthetic()


class Log(pl.LightningModule):
    """Remembers the samples that it was trained on."""

    def __init__(self, early: bool = False) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: list[list[int]] = []
        self.early = early

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.seen.append(batch["sample_ids"].tolist())
        return self.weight * batch["inputs"].float().mean()

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        pass

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return batch["sample_ids"]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.early:
            assert self.trainer.estimated_stepping_batches
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trainer(folder: Path, max_steps: int = 9, **options) -> pl.Trainer:
    save = ModelCheckpoint(folder, "{step}", every_n_train_steps=2, save_top_k=-1)
    return pl.Trainer(
        max_steps=max_steps,
        accelerator="cpu",
        accumulate_grad_batches=2,
        val_check_interval=6,
        check_val_every_n_epoch=None,
        callbacks=[save],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[list[list[int]], Path]:
    """What a run of 18 micro-batches sees, and its checkpoint of the step 4."""
    folder, log = tmp_path_factory.mktemp("whole"), Log()
    trainer(folder).fit(log, datamodule=synthetic())
    assert len(log.seen) == 18
    return log.seen, folder / "step=4.ckpt"


@pytest.mark.parametrize("early", [False, True], ids=["plain", "schedule reads the steps"])
@pytest.mark.filterwarnings("ignore")
def test_a_resumed_run_continues_the_stream(whole, tmp_path: Path, early: bool) -> None:
    rest = Log(early)
    trainer(tmp_path).fit(rest, datamodule=synthetic(), ckpt_path=whole[1])
    assert rest.seen == whole[0][8:]


@pytest.mark.filterwarnings("ignore")
def test_epochs_of_lightning_do_not_restart_the_stream(whole, tmp_path: Path) -> None:
    cut = Log()
    trainer(tmp_path, limit_train_batches=4).fit(cut, datamodule=synthetic())
    assert cut.seen == whole[0]


@pytest.mark.filterwarnings("ignore")
def test_a_stream_made_before_the_checkpoint_is_refused(whole, tmp_path: Path) -> None:
    again = trainer(tmp_path, max_epochs=1)
    with pytest.raises(RuntimeError, match="estimated_stepping_batches"):
        again.fit(Log(early=True), datamodule=synthetic(), ckpt_path=whole[1])


@pytest.mark.filterwarnings("ignore")
def test_steps_must_be_counted(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"max_steps is not set.*Synthetic is 6 steps"):
        trainer(tmp_path, max_steps=-1).fit(Log(), datamodule=synthetic())
    trainer(tmp_path, max_steps=-1, fast_dev_run=1).fit(Log(), datamodule=synthetic())


@pytest.mark.filterwarnings("ignore")
def test_predict_reads_the_chosen_split(tmp_path: Path) -> None:
    outputs = trainer(tmp_path).predict(Log(), datamodule=synthetic(predict_split="val"))
    assert torch.cat(outputs).tolist() == list(range(21))


def test_a_script_ends_while_it_has_a_loader_with_processes() -> None:
    """Loader processes ignore the one SIGTERM of multiprocessing, which then waits for them."""
    code = """
from datamodules import Synthetic

data = Synthetic(num_workers=1)
data.setup("fit")
batches = iter(data.train_dataloader())
print(len(next(batches)["inputs"]))
"""
    done = fresh_python("-c", code)
    assert (done.stdout, done.stderr) == ("32\n", "")
