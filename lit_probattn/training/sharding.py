"""Sharded data parallelism (FSDP).

As with DDP, every rank processes separate samples, but with W ranks it stores 1/W of each tensor,
and gathers a block's parameters only while that block is computed. For models that exceed one
device.
"""

from datetime import timedelta

from lightning.pytorch.strategies import ModelParallelStrategy

from lit_probattn.training.lightning_internals import form_process_group, shard_over


class ShardedDataParallel(ModelParallelStrategy):
    """Lightning's strategy for PyTorch's `fully_shard`, over all ranks of the run.

    Lightning's `FSDPStrategy` wraps PyTorch's older flat-parameter implementation and supports GPUs
    only; this strategy supports every device with a process group. Checkpoints are equal to those
    of a
    single process: they can be resumed, evaluated and exported with any number of ranks.

    Args:
        timeout: timeout of communication between ranks.
        process_group_backend: `nccl` or `gloo`; None selects by device.
    """

    def __init__(
        self, timeout: timedelta = timedelta(minutes=5), process_group_backend: str | None = None
    ) -> None:
        super().__init__(
            tensor_parallel_size=1,
            save_distributed_checkpoint=False,
            timeout=timeout,
            process_group_backend=process_group_backend,
        )

    def setup_environment(self) -> None:
        """Form the process group, and the mesh if there is a model."""
        shard_over(self, self.num_nodes * self.num_processes)
        if self.lightning_module is None:  # the ranks agree on a run folder first
            form_process_group(self)
        else:
            super().setup_environment()
