"""Pictures of a report: scales and colours of ratios, words, and what is not drawn."""

from __future__ import annotations

import pandas as pd
import pytest

from profiling.report import figures

NAMES = {"softmax8": "softmax, 8 heads", "fish2": "FiSH, 8 heads from 2 score maps"}


def ratios(values, metric="macs", predicted=None):
    """A table of ratios over two widths and the lengths of `values`."""
    rows = [
        {
            "metric": metric,
            "variant": "fish2",
            "baseline": "softmax8",
            "embed_dim": width,
            "seq_len": length,
            "scope": "model",
            "mode": "train",
            "ratio_measured": value,
            "ratio_analytic": None if predicted else value,
            "ratio_predicted": predicted,
        }
        for width in (64, 128)
        for length, value in values.items()
    ]
    columns = {"ratio_analytic": float, "ratio_predicted": float}
    return pd.DataFrame(rows).astype(columns)


@pytest.mark.parametrize("largest", [1.2, 17.0])
def test_colours_of_ratios_are_centred_on_one_whatever_else_is_there(largest):
    figure = figures.heat_maps(ratios({8: 0.95, 16: 1.17, 32: largest}), NAMES)
    panel, bar = figure.axes
    (image,) = panel.collections
    assert image.cmap.name == "RdBu_r"
    place = [float(image.norm(value)) for value in (0.5, 0.95, 1.0, 1.17, 2.0)]
    assert place == pytest.approx([0.0, 0.463, 0.5, 0.6133, 1.0], abs=1e-3)
    assert "← cheaper" in bar.get_ylabel()
    assert "dearer →" in bar.get_ylabel()
    assert "1" in [text.get_text() for text in bar.get_yticklabels()]
    assert (panel.get_xlabel(), panel.get_ylabel()) == (
        *("sequence length N", "embedding dimension D"),
    )
    assert panel.get_title() == "FiSH, 8 heads from 2 score maps\nratio to softmax, 8 heads"
    shown = {text.get_text() for text in panel.texts}
    assert {"0.950", "1.170", f"{largest:.3f}"} == shown


def test_small_ratios_begin_at_zero_and_large_ones_are_logarithmic():
    small, large = (
        figures.ratio_lines(ratios(values), NAMES, "seq_len", "embed_dim").axes[0]
        for values in ({8: 0.9, 16: 0.7}, {8: 0.95, 16: 17.0})
    )
    assert (small.get_yscale(), small.get_ylim()) == ("linear", (0.0, 1.1))
    assert large.get_yscale() == "log"
    low, high = large.get_ylim()
    assert low < 0.95 < 1.0 < 17.0 < high
    assert small.get_ylabel() == "ratio to softmax, 8 heads\n(below 1 = cheaper)"
    assert [text.get_text() for text in small.get_legend().get_texts()] == ["D = 64", "D = 128"]


@pytest.mark.parametrize(
    ("metric", "predicted", "words"),
    [
        ("macs", None, "curves: closed form, dots: counted"),
        ("peak_memory_bytes", 0.9, "curves: predicted, dots: measured"),
    ],
)
def test_words_say_how_numbers_were_found(metric, predicted, words):
    table = ratios({8: 0.9, 16: 0.8}, metric, predicted)
    figure = figures.ratio_lines(table, NAMES, "seq_len", "embed_dim")
    assert words in " ".join(figure.get_suptitle().split())


def errors(*values):
    lengths = range(8, 8 + len(values))
    frame = pd.DataFrame({"seq_len": lengths, "error": values})
    return frame.assign(variant="fish2", metric="macs")


def test_pictures_without_content_are_not_drawn():
    for empty in (errors(), errors(0.5), errors(0.0, 0.0), errors(1e-9, 0.0)):
        assert not figures.has_errors(empty)
    assert figures.has_errors(errors(0.0, 1e-3))
    figure = figures.error_figure(errors(0.0, 1e-3))
    assert figure.axes[0].get_ylim() == (-0.01, 0.01)


def test_variants_are_named_in_plain_words():
    arguments = ['{"num_heads": 8}', '{"num_global_heads": 2}', "{}", "{}"]
    frame = pd.DataFrame(
        {
            "variant": ["a", "b", "c", "c"],
            "attention_class": ["Softmax", "FiSH", "MGK", "MGK"],
            "attention_args": arguments,
            "num_heads": [8, 8, 1, 2],
        }
    )
    frame["attention_class"] += "Attention"
    assert figures.plain_names(frame) == {
        "a": "softmax, 8 heads",
        "b": "FiSH, 8 heads from 2 score maps",
        "c": "MGK",
    }
