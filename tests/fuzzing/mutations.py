"""Random edits of sound inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hypothesis import strategies as st

KINDS = ("flip", "set", "delete", "insert", "repeat", "cut", "swap lines", "join lines")


class Edit(NamedTuple):
    """One edit.

    Args:
        kind: one of KINDS.
        place: where, modulo the length.
        size: how many bytes, or which bit.
        content: what is inserted.
    """

    kind: str
    place: int
    size: int
    content: bytes


def edits(words: Sequence[bytes]) -> st.SearchStrategy[list[Edit]]:
    """One to four edits; what is inserted is random or one of `words`."""
    content = st.one_of(st.binary(min_size=1, max_size=6), st.sampled_from([*words, b"\n", b" "]))
    one = st.builds(
        Edit, st.sampled_from(KINDS), st.integers(0, 1 << 20), st.integers(0, 40), content
    )
    return st.lists(one, min_size=1, max_size=4)


def apply(content: bytes, changes: Sequence[Edit]) -> bytes:
    """Edit a file."""
    for change in changes:
        content = _apply(content, change)
    return content


def _apply(content: bytes, edit: Edit) -> bytes:
    place = edit.place % max(len(content), 1)
    head, tail = content[:place], content[place:]
    if edit.kind == "flip":
        return head + bytes([tail[0] ^ (1 << edit.size % 8)]) + tail[1:] if tail else content
    if edit.kind == "set":
        return head + edit.content[:1] + tail[1:]
    if edit.kind == "delete":
        return head + tail[edit.size + 1 :]
    if edit.kind == "insert":
        return head + edit.content + tail
    if edit.kind == "repeat":
        return head + tail[: edit.size + 1] + tail
    if edit.kind == "cut":
        return head
    lines = content.split(b"\n")
    first, second = place % len(lines), (place + edit.size) % len(lines)
    if edit.kind == "swap lines":
        lines[first], lines[second] = lines[second], lines[first]
        return b"\n".join(lines)
    return b"\n".join(lines[:first]) + b"\n".join(lines[first:])
