"""Sharded data parallelism (FSDP).

Every rank works on its own samples, as with DDP, but keeps 1/W of each tensor of W ranks, and
gathers a block's parameters only while that block computes. For models that one device cannot hold.
"""

from datetime import timedelta

from lightning.pytorch.strategies import ModelParallelStrategy

from lit_probattn.training.lightning_internals import form_process_group, shard_over


class ShardedDataParallel(ModelParallelStrategy):
    """Lightning's strategy for PyTorch's `fully_shard`, over all ranks of the run.

    Lightning's `FSDPStrategy` wraps PyTorch's older, flat-parameter form and runs on GPUs only;
    this one runs wherever there is a process group. Checkpoints are those of one process: they can
    be continued, scored and exported with any number of ranks.

    Args:
        timeout: how long a rank waits for another before it gives up.
        process_group_backend: `nccl` or `gloo`; None chooses by device.
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
        """Form the process group; the mesh too once there is a model."""
        shard_over(self, self.num_nodes * self.num_processes)
        if self.lightning_module is None:  # the ranks agree on a run folder first
            form_process_group(self)
        else:
            super().setup_environment()
