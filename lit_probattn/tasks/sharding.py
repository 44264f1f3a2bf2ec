"""Sharded data parallelism (FSDP): parameters, gradients and optimiser state split over the ranks.

Every rank works on its own samples, as with DDP, but keeps 1/W of each tensor of W ranks, and
gathers a block's parameters only while that block computes. For models that one device cannot hold.
"""

from datetime import timedelta
from typing import Any

from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lit_probattn.attention import Attention


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
        self,
        timeout: timedelta = timedelta(minutes=5),
        process_group_backend: str | None = None,
    ) -> None:
        super().__init__(
            tensor_parallel_size=1,
            save_distributed_checkpoint=False,
            timeout=timeout,
            process_group_backend=process_group_backend,
        )

    def setup_environment(self) -> None:
        """Form the process group; the mesh too once there is a model."""
        self._data_parallel_size = self.num_nodes * self.num_processes
        if self._lightning_module is None:  # the ranks agree on a run folder first
            self._setup_distributed()
        else:
            super().setup_environment()


def shard(model: nn.Module, mesh: DeviceMesh) -> None:
    """Split a model's parameters over a mesh, one group per attention block and one for the rest.

    Args:
        model: changed in place; the parameters become DTensors.
        mesh: one-dimensional.
    """
    from torch.distributed.fsdp import fully_shard

    names = [name for name, module in model.named_modules() if isinstance(module, Attention)]
    blocks = {name.rpartition(".")[0] for name in names} - {""}
    for name in sorted(blocks):
        fully_shard(model.get_submodule(name), mesh=mesh)
    fully_shard(model, mesh=mesh)


def local_part(tensor: Tensor) -> Tensor:
    """What this rank keeps of a tensor; the tensor itself if it is not split."""
    part: Any = getattr(tensor, "to_local", None)
    return tensor if part is None else part()
