"""Writing generated Pathfinder pictures in the format of the release, by several processes.

One metadata file stands for up to 1000 pictures. Worker w of W writes files w, w + W, w + 2W, …;
what a file holds does not depend on who writes it, so the result is the same for any number of
processes. A metadata file is written when its pictures are, so what an interrupted process left is
taken up again. Workers are started as programs of their own: nothing depends on how the caller's
program was started.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from PIL import Image as PilImage

from datamodules.core.errors import DataError
from datamodules.lra.pathfinder_generator import draw_picture
from datamodules.lra.pathfinder_settings import GENERATOR_VERSION, GeneratorSettings

__all__ = ["PICTURES_PER_FILE", "serve", "write_pictures"]

PICTURES_PER_FILE = 1000
_SETTINGS_FILE = "generator.json"
_REPORT_EVERY = 10


def write_pictures(
    folder: Path,
    settings: GeneratorSettings,
    num_pictures: int,
    num_processes: int,
    advance: Callable[[int], None],
) -> None:
    """Write pictures 0..num_pictures-1 below `folder`, unless they are there.

    Args:
        folder: Folder of the difficulty; made if needed.
        settings: Parameters of the generator.
        num_pictures: How many pictures.
        num_processes: How many processes; changes nothing else.
        advance: Told the number of pictures written, or found.

    Raises:
        DataError: The folder holds something else or cannot be written, or a worker failed.
    """
    try:
        _claim(folder, settings, num_pictures)
    except OSError as error:
        raise DataError(
            f"the folder {folder} cannot be written ({error.strerror or error}); set generated_dir"
        ) from error
    if num_processes == 1:
        _write_files(folder, settings, num_pictures, 0, 1, advance)
        return
    job = json.dumps([str(folder), dataclasses.asdict(settings), num_pictures, num_processes])
    workers = [_start(job, rank) for rank in range(num_processes)]
    try:
        _follow(workers, advance)
    finally:
        for worker in workers:
            worker.kill()
        for worker in workers:
            worker.communicate()


def _claim(folder: Path, settings: GeneratorSettings, num_pictures: int) -> None:
    """Note in the folder what is written there, or compare with what is noted."""
    wanted = {
        "generator_version": GENERATOR_VERSION,
        "num_pictures": num_pictures,
        **dataclasses.asdict(settings),
    }
    text = json.dumps(wanted, indent=1, sort_keys=True)
    folder.mkdir(parents=True, exist_ok=True)
    note = folder / _SETTINGS_FILE
    if note.is_file():
        if note.read_text() != text:
            raise DataError(
                f"{note}: the folder holds pictures of other settings; set generated_dir"
            )
    elif any(folder.iterdir()):
        raise DataError(f"{folder} is not empty and was not generated; set generated_dir")
    else:
        _write_whole(note, text)


def _write_files(
    folder: Path,
    settings: GeneratorSettings,
    num_pictures: int,
    rank: int,
    num_processes: int,
    advance: Callable[[int], None],
) -> None:
    """Write every W-th metadata file with its pictures."""
    (folder / "metadata").mkdir(exist_ok=True)
    num_files = -(-num_pictures // PICTURES_PER_FILE)
    for number in range(rank, num_files, num_processes):
        first = number * PICTURES_PER_FILE
        count = min(PICTURES_PER_FILE, num_pictures - first)
        metadata = folder / "metadata" / f"{number}.npy"
        if metadata.is_file():
            advance(count)
        else:
            lines = _write_file(folder, settings, number, range(first, first + count), advance)
            _write_whole(metadata, lines)


def _write_file(
    folder: Path,
    settings: GeneratorSettings,
    number: int,
    indices: range,
    advance: Callable[[int], None],
) -> str:
    """Write the pictures of one metadata file. Returns its text."""
    place = folder / "imgs" / str(number)
    place.mkdir(parents=True, exist_ok=True)
    lines, unreported = [], 0
    for row, index in enumerate(indices):
        picture = draw_picture(settings, index)
        PilImage.fromarray(picture.pixels).save(place / f"sample_{row}.png")
        words: list[Any] = [f"imgs/{number}", f"sample_{row}.png", row, picture.label]
        words += [settings.continuity, settings.contour_length, settings.distractor_length]
        words += [settings.paddle_length, settings.paddle_thickness, picture.margin, 1]
        lines.append(" ".join(map(str, words)) + "\n")
        unreported += 1
        if unreported == _REPORT_EVERY:
            advance(unreported)
            unreported = 0
    advance(unreported)
    return "".join(lines)


def _write_whole(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text)
    temporary.replace(path)


def _start(job: str, rank: int) -> subprocess.Popen[str]:
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.Popen(
        [sys.executable, "-c", f"from {__name__} import serve; serve()", job, str(rank)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )


def _follow(workers: list[subprocess.Popen[str]], advance: Callable[[int], None]) -> None:
    """Wait for the workers, passing on what they report."""
    lock = threading.Lock()

    def listen(worker: subprocess.Popen[str]) -> None:
        assert worker.stdout is not None
        for line in worker.stdout:
            with lock:
                advance(int(line))

    threads = [threading.Thread(target=listen, args=(w,), daemon=True) for w in workers]
    for thread in threads:
        thread.start()
    for worker, thread in zip(workers, threads, strict=True):
        thread.join()
        if worker.wait():
            raise DataError(
                f"Pathfinder: a generating process failed (exit status {worker.returncode})"
            )


def serve() -> None:
    """Be a worker: write the files of one rank, report on the standard output."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller decides when to stop
    folder, settings, num_pictures, num_processes = json.loads(sys.argv[1])
    settings["paddle_margins"] = tuple(settings["paddle_margins"])

    def report(count: int) -> None:
        print(count, flush=True)

    with contextlib.suppress(BrokenPipeError):
        _write_files(
            Path(folder),
            GeneratorSettings(**settings),
            num_pictures,
            int(sys.argv[2]),
            num_processes,
            report,
        )
