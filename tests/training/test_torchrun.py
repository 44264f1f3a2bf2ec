"""torchrun starts a dead group again, which resumes from the last good checkpoint."""

from __future__ import annotations

import pytest

from tests.support.fresh import fresh_python
from tests.support.runs import arguments, fingerprint, in_ranks, only_version, write_attention

TWO = ("--trainer.devices", "2", "--trainer.strategy", "ddp", "--run.checkpoint_every", "2")


def command(folder):
    attention = write_attention(folder, "MGKAttention", dropout=0.2, e_step="soft")
    return arguments("fit", folder, *TWO, attention=attention)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    from lit_probattn.cli.app import main

    folder = tmp_path_factory.mktemp("undisturbed")
    assert in_ranks(lambda: main(command(folder))) == [0, 0]
    return only_version(folder)


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["cut", "flip"])
def test_a_restart_finds_the_last_good_checkpoint(undisturbed, tmp_path, damage):
    """The command names no checkpoint; rank 1 dies once and damages the newest one."""
    environment = {
        **{"FRAIL_AT": "11", "FRAIL_DAMAGE": damage, "FRAIL_ROOT": str(tmp_path / "runs")},
        "OMP_NUM_THREADS": "1",
        # As docs/distributed.md has it: who starts again must not meet where the dead did.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    frail = ["--max-restarts", "1", "-m", "tests.killing.frail_fit"]
    done = fresh_python(*torchrun, *frail, *command(tmp_path), **environment)
    assert "step-00000010.ckpt is corrupt" in done.stderr
    assert "from step-00000008.ckpt" in done.stdout
    assert fingerprint(only_version(tmp_path)) == fingerprint(undisturbed)
