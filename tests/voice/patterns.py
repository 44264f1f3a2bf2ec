"""Twelve habits that read as translated, each as a regular expression and its remedy.

A hit is worth a second look; no hit proves nothing. Hits that are right as they stand are in
`accepted.txt`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Pattern:
    """A habit, and the words to use instead."""

    name: str
    remedy: str
    expression: str

    def found(self, text: str) -> bool:
        """Return whether a sentence has the habit, code spans left out."""
        return bool(re.search(self.expression, re.sub(r"`[^`]*`", "`x`", text)))


_PHRASE_IS = r"(?:is|are|was|were|be|been)"

PATTERNS = (
    Pattern(
        "continuation",
        "resume, continue, start from",
        r"\b(?:go|goes|going|went) on\b|\b(?:begins?|began|begun|beginning) "
        r"(?:with|anew|again|where|from|there)\b",
    ),
    Pattern(
        "speaking things",
        "contain, show, print, store, attend to",
        r"\b(?:[Tt]ells?|told|[Ss]ays?|said|knows|sees|see nothing)\b",
    ),
    Pattern(
        "service",
        "reject, raise, support, does not support",
        r"\b[Rr]efus(?:e|es|ed|al(?:s)?|ing)\b|\bserv(?:e|es|ed)\b|\bhas (?:no|a) place\b",
    ),
    Pattern(
        "universal verb",
        "accept, select, return, specify, compute",
        rf"\b{_PHRASE_IS} (?:taken|given|made|found)\b|\bnot given\b",
    ),
    Pattern(
        "headless comparison",
        "repeat the noun, or make a compound",
        r"\b(?:that|those) of\b|\bthe (?:same|other) of\b",
    ),
    Pattern(
        "possession",
        "a separate x, your x, the reproduced value",
        r"\bof (?:its|their|your|our|one.s) own\b|\bof (?:ours|yours|theirs)\b"
        r"|\b(?:is|are|beside|within|than) ours\b",
    ),
    Pattern(
        "position for relation",
        "compared with, along with, instead of",
        r"\b[Bb]eside\b|\bin (?:the )?(?:place|manner) of\b"
        r"|\bstands? (?:for|in|beside|above|below|behind)\b",
    ),
    Pattern(
        "where for if",
        "if, when",
        r"\b[Ww]here (?:there|it|no|they|a|an|one|that|nothing|all|this|both)\b|\bas far as\b",
    ),
    Pattern(
        "clause for noun",
        "name the thing",
        r"\b[Ww]hat (?:is|are|was|were|it|they|a|an|the|each|every|that|those|this|follows|failed"
        r"|comes|makes|one|no)\b",
    ),
    Pattern(
        "negated noun",
        "negate the verb; missing, unused, unchanged, without",
        r"\b(?:[Nn]othing|[Nn]one|[Nn]o [a-z-]+) (?:is|are|was|were|has|have|does|do|can)\b"
        r"|\b(?:decides?|prints|draws?|knows?|makes?) (?:no|nothing)\b|\bhas not\b",
    ),
    Pattern(
        "no subject or verb",
        "a subject and a verb; help texts start with a noun or an imperative",
        r"^(?:of|in|for|from|by|its|with) [a-z]+ [a-z]|\btoo[.;:)]"
        r"|^(?:Printed|Logged|Predicted|Refused|Not seen)\b",
    ),
    Pattern(
        "everyday noun",
        "buffer, whitespace, masked token, embedding, image, figure, expensive, point",
        r"\b(?:[Rr]ooms?|blanks?|[Hh]idden words?|tables? of (?:tokens|positions|words)"
        r"|[Pp]ictures?|dearer|[Pp]laces?)\b",
    ),
)


def habits(text: str) -> list[str]:
    """Return the names of the habits that a sentence shows."""
    return [pattern.name for pattern in PATTERNS if pattern.found(text)]
