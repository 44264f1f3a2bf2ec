"""Chunks of the ListOps generator in order, drawn by several processes.

Worker w of W draws chunks w, w + W, w + 2W, … and writes them to a pipe; the reader takes one from
each worker in turn. So the sequence of chunks is the same for any number of processes, a worker is
never more than a pipe's buffer ahead, and nothing depends on how the caller's program was started
(no fork of a process with threads, no import of its main module).
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import IO

import numpy as np

from datamodules.core.errors import DataError
from datamodules.lra.listops_generator import Chunk, GeneratorSettings, generate_chunk

__all__ = ["generate_chunks", "serve"]

_HEADER = struct.Struct("<qq")  # number of samples, number of tokens


def generate_chunks(
    settings: GeneratorSettings, num_processes: int
) -> Generator[Chunk, None, None]:
    """Yield chunk 0, 1, 2, … without end, drawn by `num_processes` processes.

    Close the generator (or let it go) to stop the workers.

    Raises:
        DataError: A worker ended.
    """
    if num_processes == 1:
        yield from (generate_chunk(settings, chunk) for chunk in itertools.count())
        return
    workers = [_start_worker(settings, rank, num_processes) for rank in range(num_processes)]
    try:
        for rank in itertools.cycle(range(num_processes)):
            pipe = workers[rank].stdout
            assert pipe is not None
            chunk = _read_chunk(pipe)
            if chunk is None:
                status = workers[rank].wait()
                raise DataError(f"ListOps: a generating process ended early (exit status {status})")
            yield chunk
    finally:
        for worker in workers:
            worker.kill()
        for worker in workers:
            worker.communicate()


def _start_worker(
    settings: GeneratorSettings, rank: int, num_processes: int
) -> subprocess.Popen[bytes]:
    job = json.dumps([dataclasses.asdict(settings), rank, num_processes])
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.Popen(
        [sys.executable, "-c", f"from {__name__} import serve; serve()", job],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
    )


def serve() -> None:
    """Write every W-th chunk to the standard output until the reader goes away."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the reader decides when to stop
    settings, rank, num_processes = json.loads(sys.argv[1])
    with open(os.dup(1), "wb") as pipe:
        try:
            for chunk in itertools.count(rank, num_processes):
                _write_chunk(pipe, generate_chunk(GeneratorSettings(**settings), chunk))
        except BrokenPipeError:
            os._exit(0)


def _write_chunk(pipe: IO[bytes], chunk: Chunk) -> None:
    pipe.write(_HEADER.pack(len(chunk.lengths), len(chunk.tokens)))
    pipe.write(chunk.lengths.astype("<i4").tobytes())
    pipe.write(chunk.targets.tobytes())
    pipe.write(chunk.tokens.tobytes())
    pipe.flush()


def _read_chunk(pipe: IO[bytes]) -> Chunk | None:
    """Read one chunk; None at the end of the pipe."""
    header = pipe.read(_HEADER.size)
    if len(header) < _HEADER.size:
        return None
    num_samples, num_tokens = _HEADER.unpack(header)
    data = pipe.read(5 * num_samples + num_tokens)
    if len(data) < 5 * num_samples + num_tokens:
        return None
    return Chunk(
        tokens=np.frombuffer(data, np.uint8, num_tokens, 5 * num_samples),
        lengths=np.frombuffer(data, "<i4", num_samples),
        targets=np.frombuffer(data, np.uint8, num_samples, 4 * num_samples),
    )
