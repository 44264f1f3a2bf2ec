"""Where the papers' operation counts and the counted multiply-adds differ, term by term."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Term:
    """One line of the explanation; all lines but the totals add up."""

    text: str
    operations: int
    is_total: bool = False


def explain(
    n: int, h: int, e: int, c: int, k: int, shifted: bool, with_priors: bool = True
) -> list[Term]:
    """Lead from twice the multiply-adds of one attention layer to the paper's operations.

    Args:
        n: sequence length.
        h: heads of this layer.
        e: head size.
        c: width.
        k: components; 1 with `shifted` False is softmax attention.
        shifted: shifted keys (sMGK).
        with_priors: whether the layer is a mixture (then the paper's printed total differs).
    """
    keys = h * e * (1 if shifted else k)
    inner, width = h * e, h * e * k
    macs = n * c * (inner + keys + inner) + n * n * h * (k * e + e) + n * inner * c
    outputs = n * (inner + keys + inner) + k * h * n * n + h * n * e + n * c
    terms = [
        Term("2 x multiply-adds of our layer", 2 * macs, True),
        Term("a sum of k products needs k - 1 additions: one less per output", -outputs),
    ]
    if k > 1:
        terms.append(Term("additions that combine the components, per pair", (k - 1) * h * n * n))
    if shifted:
        terms.append(Term("additions of the shifts to every key", k * n * h * e))
    terms.append(
        Term(
            f"output projection to the paper's width H·E = {width} instead of C = {c}",
            n * (width - c) * (2 * inner - 1),
        )
    )
    total = sum(t.operations for t in terms)
    terms.append(Term("operations by the paper's rule (corrected constant)", total, True))
    if with_priors and not shifted and k > 1:
        gap = n * h * e * (k - 1)
        terms.append(Term("the paper's simplification: −(3K+2)/K where −(2K+3)/K is right", -gap))
        terms.append(Term("operations as the paper prints them", total - gap, True))
    return terms


def explain_row(row: dict[str, Any]) -> list[Term] | None:
    """Explain an analytic attention row of softmax, MGK or sMGK; None for other variants."""
    if row["attention_class"] not in ("SoftmaxAttention", "MGKAttention"):
        return None
    arguments = json.loads(row["attention_args"])
    mixture = row["attention_class"] == "MGKAttention"
    if arguments.get("num_kv_heads") or arguments.get("value_head_dim"):
        return None
    return explain(
        int(row["seq_len"]),
        int(row["num_heads"]),
        int(row["head_dim"]),
        int(row["embed_dim"]),
        int(arguments.get("num_components", 2)) if mixture else 1,
        bool(arguments.get("shifted_keys", False)) if mixture else False,
        with_priors=mixture,
    )
