"""`python -m tests.attention.engines.backend_table`: the docs' two tables of backend support."""

from __future__ import annotations

from lit_probattn.attention.backends import AUTO
from lit_probattn.attention.call import outline
from lit_probattn.attention.engines.table import NORMAL_FORM
from tests.attention.variants import EMBED, shipped_variants

# How the page names what a call or a variant needs: features of `Engine.lacks`.
NEEDS = {
    "hard E-step": {"maximum"},
    "noise on global maps": {"map noise"},
    "noise per local head": {"head noise"},
    "two-layer mixing of maps": {"function"},
    "even powers of a map": {"function", "power"},
    "other functions of maps (`relu_sum`)": {"function", "function without layers"},
    "α-entmax": {"normaliser"},
    "`row_eps`": {"row_eps"},
    "`reference_scores` of a class": {"own scores"},
    "`normalise`, `mix_weights` of a class": {"own weights"},
    "attention dropout": {"dropout"},
    "gradient of an additive bias": {"bias gradient"},
    "`torch.func`": {"transform"},
    "export, ONNX": {"exported"},
    "export for any number of positions": {"exported", "dynamic"},
}


def table() -> str:
    """Return the table: a row for each feature, a column for each engine."""
    names = list(NORMAL_FORM)
    lines = ["| | " + " | ".join(f"`{name}`" for name in names) + " |"]
    lines.append("| --- |" + " --- |" * len(names))
    for told, needs in NEEDS.items():
        marks = ["–" if needs & NORMAL_FORM[name].lacks.keys() else "yes" for name in names]
        lines.append(f"| {told} | " + " | ".join(marks) + " |")
    return "\n".join(lines)


def variants_table() -> str:
    """Return the table of shipped configurations in training, with heads of 32 entries."""
    lines = ["| configuration | needs | engines | row of `AUTO` |", "| --- | --- | --- | --- |"]
    for name, (cls, options) in shipped_variants().items():
        core = cls(EMBED, head_dim=32, **options).core
        needs = ", ".join(f"{need} ({option})" for need, option in core.needs().items())
        kind = core.auto_kind or core.variant(outline(core.layout, 1, 1, 1)).kind
        assert kind in AUTO
        lines.append(f"| `{name}` | {needs or '–'} | {', '.join(core.backends)} | {kind} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(), variants_table(), sep="\n\n")
