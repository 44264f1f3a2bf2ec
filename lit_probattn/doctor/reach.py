"""Whether processes of this machine can talk to each other: gloo, and NCCL where there are GPUs.

    python -m lit_probattn.doctor.reach BACKEND RANK COUNT PORT TIMEOUT_S

is one of the processes; `check_contact` starts them and waits a bounded time.
"""

from __future__ import annotations

import argparse
import datetime
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.lightning import find_free_network_port

from lit_probattn.base.torch_internals import loopback_store
from lit_probattn.doctor.findings import Finding

SECTION = "Contact between processes"


def check_contact(timeout_s: float) -> Iterator[Finding]:
    """Yield a line for a sum over two processes by gloo, and over up to two GPUs by NCCL."""
    yield _try("gloo", 2, timeout_s)
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not gpus:
        yield Finding(SECTION, "nccl", "note", "not tried: it needs a GPU")
    elif not dist.is_nccl_available():
        yield Finding(SECTION, "nccl", "problem", "this PyTorch was built without NCCL")
    else:
        yield _try("nccl", min(gpus, 2), timeout_s)


def _try(backend: str, count: int, timeout_s: float) -> Finding:
    start, port = time.monotonic(), find_free_network_port()
    words = [sys.executable, "-m", "lit_probattn.doctor.reach", backend]
    processes = [
        subprocess.Popen(
            [*words, *map(str, (rank, count, port, timeout_s))],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(count)
    ]
    failures = []
    for process in processes:
        try:
            _, told = process.communicate(timeout=max(0.1, start + timeout_s - time.monotonic()))
            if process.returncode:
                failures.append((told.strip().splitlines() or ["no message"])[-1])
        except subprocess.TimeoutExpired:
            failures.append(f"no answer within {timeout_s:.0f} s")
    for process in processes:
        process.kill()
        process.communicate()
    if failures:
        hint = f"set {backend.upper()}_SOCKET_IFNAME to the interface of this network"
        return Finding(SECTION, backend, "problem", f"{failures[0]}; {hint}")
    seconds = time.monotonic() - start
    return Finding(SECTION, backend, "ok", f"{count} processes agree after {seconds:.1f} s")


def main(arguments: Sequence[str] | None = None) -> int:
    """Join the group and sum a number over it; return the exit status.

    Raises:
        RuntimeError: the sum is wrong.
    """
    parser = argparse.ArgumentParser(
        prog="python -m lit_probattn.doctor.reach",
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("backend", choices=("gloo", "nccl"))
    parser.add_argument("rank", type=int, help="of this process")
    parser.add_argument("count", type=int, help="of processes")
    parser.add_argument("port", type=int, help="where the processes meet, on this machine")
    parser.add_argument("timeout_s", type=float, help="how long to wait for the others")
    options = parser.parse_args(arguments)
    rank, count = options.rank, options.count
    device = torch.device("cuda", rank) if options.backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = loopback_store(options.port) if rank == 0 else None
    dist.init_process_group(
        options.backend,
        init_method=f"tcp://127.0.0.1:{options.port}",
        rank=rank,
        world_size=count,
        timeout=datetime.timedelta(seconds=options.timeout_s),
    )
    number = torch.tensor([float(rank + 1)], device=device)
    dist.all_reduce(number)
    dist.destroy_process_group()
    del store  # it was needed until here
    if float(number) != count * (count + 1) / 2:
        raise RuntimeError(f"the sum over {count} processes is {float(number)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
