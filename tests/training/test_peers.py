"""A rank that dies ends the others in bounded time, and they say which one it was."""

from __future__ import annotations

import functools
import re
import signal
import threading
import time
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch.distributed as dist

from lit_probattn.cli.app import main
from lit_probattn.cli.errors import exit_status
from lit_probattn.training.callbacks import FinalValidation, SameSources
from lit_probattn.training.memory import MemoryAdvice
from lit_probattn.training.peers import Heartbeats, Peers, is_lost_contact
from lit_probattn.training.preemption import StopSignals
from lit_probattn.training.saving import RunCheckpoint
from tests.support.runs import arguments, at_micro_batch, in_ranks, kill_me, run
from tests.tasks import tiny

TWO = ("--trainer.devices", "2", "--trainer.strategy", "ddp")
INTERVAL = 0.05


@pytest.fixture
def store():
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def peers(store, count=3):
    others = [
        dist.TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False)
        for _ in range(count - 1)
    ]
    return [Peers(s, rank, count, INTERVAL) for rank, s in enumerate((store, *others))]


def test_the_rank_that_stopped_counting_is_named(store):
    first, second, third = peers(store)
    third.progress = 17
    time.sleep(3 * INTERVAL)
    third.close()
    told = first.explain()
    assert re.search(r"rank 2 \(.*, process \d+, at micro-batch 17\) died", told), told
    assert "rank 1 (" not in told
    assert "rank 0 ended at micro-batch 0" in told
    first.close(), second.close()


def test_the_failure_of_a_rank_reaches_the_others(store):
    first, second, third = peers(store)
    second.note_failure("ValueError: bad sample 4")
    told = third.explain()
    assert re.match(r"rank 1 \(.*\) failed: ValueError: bad sample 4; rank 2 ended", told), told
    third.note_failure("RuntimeError: Connection closed")  # a consequence: the first one counts
    assert "bad sample 4" in first.explain()
    for each in (first, second, third):
        each.close()


def test_the_rank_of_the_store_waits_until_the_others_have_read_its_failure(monkeypatch):
    waits = []
    monkeypatch.setattr("lit_probattn.training.peers.time.sleep", waits.append)
    unread = SimpleNamespace(set=lambda *_: None, check=lambda _: False)
    for rank in (1, 0):
        assert not waits
        one = Peers(unread, rank, 2, INTERVAL)
        one.note_failure("ValueError: bad sample 4")
        one.close()
    assert 2 * INTERVAL <= sum(waits) <= 5 * INTERVAL


def test_the_rank_that_hangs_is_named_when_all_are_alive(store):
    group = peers(store)
    group[1].progress = 40
    other = threading.Thread(target=group[2].explain)
    other.start()
    told = group[0].explain()
    other.join()
    assert re.search(r"all ranks are alive, but rank 1 \(.*micro-batch 40\) did not answer", told)
    assert "rank 2 (" not in told
    for each in group:
        each.close()


def test_a_store_that_is_gone_means_rank_0():
    class Gone:
        def set(self, key, value):
            if len(calls) > 2:
                raise RuntimeError("Connection reset by peer")
            calls.append(key)

        def check(self, keys):
            return False

        def multi_get(self, keys):
            raise RuntimeError("Connection reset by peer")

    calls: list[str] = []
    told = Peers(Gone(), 1, 2, INTERVAL).explain()
    assert "store of the ranks is unreachable: rank 0" in told


def test_other_errors_are_not_taken_for_lost_contact():
    assert is_lost_contact(RuntimeError("[...] Connection closed by peer [10.0.0.2]:4000"))
    assert is_lost_contact(dist.DistBackendError("NCCL error"))
    assert not is_lost_contact(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_lost_contact(ValueError("timed out"))


@pytest.mark.usefixtures("quick_heartbeats")
def test_a_killed_rank_ends_the_other_with_its_name(monkeypatch, capfd):
    at_micro_batch(monkeypatch, 3, kill_me, rank=1)
    begin = time.monotonic()

    def train() -> None:
        two = {"devices": 2, "strategy": "ddp", "callbacks": [Heartbeats()]}
        tiny.trainer(8, **two).fit(tiny.task(), tiny.data())

    codes = in_ranks(lambda: exit_status(train), timeout=60)
    assert codes == [1, -signal.SIGKILL]
    assert time.monotonic() - begin < 60
    assert re.search(r"error: rank 1 \(.*at micro-batch \d+\) died", capfd.readouterr().err)


def test_a_training_of_the_command_line_has_heartbeats(tmp_path, monkeypatch):
    """And answers signals, and saves: what the trainings of two ranks here and elsewhere add."""
    found: set[type] = set()

    @functools.wraps(pl.Trainer.fit)  # the command line reads its arguments
    def note(self, *_, **__):
        found.update(map(type, self.callbacks))

    monkeypatch.setattr(pl.Trainer, "fit", note)
    run(arguments("fit", tmp_path))
    added = {Heartbeats, MemoryAdvice, SameSources, StopSignals, FinalValidation, RunCheckpoint}
    assert added <= found


@pytest.mark.slow
def test_an_error_of_one_rank_is_told_by_the_other(tmp_path, monkeypatch, capfd):
    def fail(_) -> None:
        raise KeyError("no such sample")

    at_micro_batch(monkeypatch, 5, fail, rank=1)
    codes = in_ranks(lambda: main(arguments("fit", tmp_path, *TWO)), timeout=60)
    assert codes == [1, 70]  # the failing rank shows its traceback
    told = capfd.readouterr().err
    assert re.search(r"error: rank 1 \(.*\) failed: KeyError: 'no such sample'; rank 0 ended", told)


@pytest.mark.slow
def test_a_rank_that_hangs_ends_the_others_after_the_timeout(tmp_path, monkeypatch, capfd):
    at_micro_batch(monkeypatch, 5, lambda _: time.sleep(25), rank=1)
    path = tmp_path / "trainer.yaml"
    path.write_text(
        "trainer:\n  strategy:\n    class_path: lightning.pytorch.strategies.DDPStrategy\n"
        "    init_args:\n      timeout: '0:00:06'\n"
    )
    work = arguments("fit", tmp_path, "--trainer.devices", "2", "--config", str(path))
    begin = time.monotonic()
    codes = in_ranks(lambda: main(work), timeout=90)
    assert codes[0] == 1
    assert time.monotonic() - begin < 90
    told = capfd.readouterr().err
    assert re.search(r"error: all ranks are alive, but rank 1 \(.*micro-batch 5\) did not", told)
