"""ListOps in the format of the Long Range Arena release: `basic_{train,val,test}.tsv`.

A header line `Source<TAB>Target`, then one expression and its value per line. An operator with
arguments a1 … an is the left-nested pair (((OP, a1), …, an), `]`), and a pair is printed as
`( left right )`. For example, MAX of 4 and 3 is `( ( ( [MAX 4 ) 3 ) ] )`. The parentheses are
redundant and dropped; operators, `]` and digits are the tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from datamodules.core.files import Release
from datamodules.lra.arena import RELEASE, RELEASE_FOLDERS
from datamodules.lra.listops_generator import CLOSE, FIRST_DIGIT, OPERATORS, TOKENS
from lit_probattn.base.errors import DataError, prefixed

SPLIT_FILES = {"train": "basic_train.tsv", "val": "basic_val.tsv", "test": "basic_test.tsv"}
FILES = Release(
    "ListOps",
    "listops --source released",
    ", ".join(SPLIT_FILES.values()),
    f"The files are part of {RELEASE}",
    ({name: (file,) for name, file in SPLIT_FILES.items()},),
    ("", "listops-1000", "listops", *(f"{folder}/listops-1000" for folder in RELEASE_FOLDERS)),
    otherwise=", or use --source generated",
)
_HEADER = b"Source\tTarget"
_OPEN, _CLOSED = 254, 253  # codes of parentheses, distinct from token ids
_CODES = {token.encode(): code for code, token in enumerate(TOKENS) if code}
_CODES |= {b"(": _OPEN, b")": _CLOSED}


def read_split(
    path: Path, advance: Callable[[int], None]
) -> tuple[list[npt.NDArray[np.uint8]], list[int]]:
    """Read and validate one file; return the token ids and the value of each expression.

    `advance` is called with the number of bytes read. A DataError gives file, line and reason.
    """
    tokens: list[npt.NDArray[np.uint8]] = []
    targets: list[int] = []
    with path.open("rb") as file:
        header = file.readline()
        if not header:
            raise DataError(f"{path}: the file is empty")
        advance(len(header))
        if header.removeprefix(b"\xef\xbb\xbf").rstrip(b"\r\n") != _HEADER:
            raise DataError(
                f"{path}:1: expected the header {_HEADER.decode()!r}, received {_shown(header)}"
            )
        for number, line in enumerate(file, start=2):
            advance(len(line))
            with prefixed(f"{path}:{number}", ValueError, to=DataError):
                expression, target = _parse_line(line.rstrip(b"\r\n"))
            tokens.append(np.frombuffer(expression, dtype=np.uint8))
            targets.append(target)
    if not targets:
        raise DataError(f"{path}: no lines after the header")
    return tokens, targets


def _parse_line(line: bytes) -> tuple[bytes, int]:
    """Return the tokens and the value of a line; raises ValueError with the reason."""
    if not line.strip():
        raise ValueError("the line is empty")
    source, *rest = line.split(b"\t")
    if len(rest) != 1:
        raise ValueError(f"expected one tab between expression and value, received {len(rest)}")
    label = rest[0].strip()
    if len(label) != 1 or not label.isdigit():
        raise ValueError(f"the value must be a digit 0..9, received {_shown(label)}")
    symbols = _to_symbols(source)
    _check_parentheses(symbols)
    tokens = symbols.translate(None, bytes([_OPEN, _CLOSED]))
    value = evaluate(tokens)
    if value != int(label):
        raise ValueError(
            f"received the value {int(label)}, but the expression evaluates to {value}"
        )
    return tokens, value


def _to_symbols(source: bytes) -> bytes:
    """Encode each word of an expression as one byte."""
    try:
        return bytes(map(_CODES.__getitem__, source.split()))
    except KeyError as error:
        raise ValueError(f"unknown token {_shown(error.args[0])}") from None


def _check_parentheses(symbols: bytes) -> None:
    codes = np.frombuffer(symbols, dtype=np.uint8)
    step = (codes == _OPEN).astype(np.int8) - (codes == _CLOSED).astype(np.int8)
    depth = np.cumsum(step, dtype=np.int64)
    if len(depth) and (depth[-1] != 0 or depth.min() < 0):
        opened, closed = symbols.count(_OPEN), symbols.count(_CLOSED)
        raise ValueError(f"unbalanced parentheses: {opened} opened, {closed} closed")


def evaluate(tokens: bytes) -> int:
    """Return the value of one complete expression of token ids; raises ValueError if malformed."""
    stack: list[tuple[int, list[int]]] = []
    arguments: list[int] = []  # of the innermost open operator; at the root, the result
    for token in tokens:
        if token >= FIRST_DIGIT:
            arguments.append(token - FIRST_DIGIT)
        elif token < CLOSE:
            stack.append((token, arguments))
            arguments = []
        elif not stack:
            raise ValueError("unbalanced brackets: a `]` has no operator")
        elif not arguments:
            raise ValueError("an operator has no arguments")
        else:
            operator, outer = stack.pop()
            outer.append(_apply(operator, arguments))
            arguments = outer
    if stack:
        raise ValueError(f"unbalanced brackets: {len(stack)} unclosed at the end of the line")
    if len(arguments) != 1:
        raise ValueError(f"expected one expression, received {len(arguments)}")
    return arguments[0]


def _apply(operator: int, arguments: list[int]) -> int:
    name = OPERATORS[operator - 1]
    if name == "[MIN":
        return min(arguments)
    if name == "[MAX":
        return max(arguments)
    if name == "[SM":
        return sum(arguments) % 10
    ordered = sorted(arguments)
    middle = len(ordered) // 2
    return (ordered[(len(ordered) - 1) // 2] + ordered[middle]) // 2


def _shown(text: bytes) -> str:
    return repr(text[:40].decode("utf-8", "backslashreplace"))
