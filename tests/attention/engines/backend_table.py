"""`python -m tests.attention.engines.backend_table`: what each engine serves, for the docs."""

from __future__ import annotations

from lit_probattn.attention.engines.table import NORMAL_FORM

# How the page names what a call or a variant needs: features of `Engine.lacks`.
NEEDS = {
    "hard E-step": {"maximum"},
    "noise on global maps": {"map noise"},
    "noise per local head": {"head noise"},
    "two-layer mixing of maps": {"function"},
    "other functions of maps (powers, `relu_sum`)": {"function", "function without layers"},
    "α-entmax": {"normaliser"},
    "`row_eps`": {"row_eps"},
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


if __name__ == "__main__":
    print(table())
