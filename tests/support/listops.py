"""ListOps written in the format of the Long Range Arena release."""

from __future__ import annotations

from pathlib import Path

from datamodules import ListOps
from datamodules.lra.listops_generator import CLOSE, FIRST_DIGIT, TOKENS
from datamodules.lra.listops_release import SPLIT_FILES


def to_line(tokens: bytes) -> str:
    """Return the released form of an expression: the source, without its value."""
    stack: list[tuple[str, list[str]]] = []
    arguments: list[str] = []
    for token in tokens:
        if token >= FIRST_DIGIT:
            arguments.append(TOKENS[token])
        elif token < CLOSE:
            stack.append((TOKENS[token], arguments))
            arguments = []
        else:
            operator, outer = stack.pop()
            inner = "".join(f" {argument} )" for argument in arguments)
            outer.append("( " * (len(arguments) + 1) + operator + inner + " ] )")
            arguments = outer
    return arguments[0]


def export_release(data: ListOps, folder: Path) -> None:
    """Write the splits of a DataModule after `setup`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, file in SPLIT_FILES.items():
        split = data.split(name)
        samples = (split[index] for index in range(len(split)))
        lines = [f"{to_line(bytes(s.values.tolist()))}\t{s.target}\n" for s in samples]
        (folder / file).write_text("Source\tTarget\n" + "".join(lines), newline="")
