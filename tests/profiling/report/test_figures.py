"""Figures of a sweep: which ones, claims and captions from rows, scales and colours of ratios."""

from __future__ import annotations

from itertools import product

import pandas as pd
import pytest

from lit_probattn.records.figures import colour_of
from profiling.report import figures
from profiling.report.figures import Quantity
from profiling.report.ratios import ratio_table
from profiling.sweep.config import Grid, SweepConfig
from tests.profiling.helpers import MGK, attention, ratio_rows, sweep

NAMES = {"softmax8": "softmax, 8 heads", "fish2": "FiSH, 8 heads from 2 score maps"}
MACS = Quantity("macs", "model", "train")


def ratios(values, metric="macs", predicted=None, widths=(64, 128)):
    """A table of ratios over some widths and the lengths of `values`."""
    columns = {"metric": metric, "variant": "fish2", "baseline": "softmax8", "mode": "train"}
    columns |= {"grid_heads": None, "backend": "reference", "scope": "model"}
    places = {(width, length): value for width in widths for length, value in values.items()}
    table = ratio_rows(places, ratio_predicted=predicted, **columns)
    return table if predicted else table.assign(ratio_analytic=table["ratio_measured"])


def drawn(table, quantity=MACS):
    return figures.ratio_figure({quantity: table}, NAMES).drawn()


@pytest.mark.parametrize("largest", [1.2, 17.0])
def test_colours_of_ratios_are_centred_on_one_whatever_else_is_there(largest):
    panel, bar = drawn(ratios({8: 0.95, 16: 1.17, 32: largest})).axes
    (image,) = panel.collections
    assert image.cmap.name == "RdBu_r"
    place = [float(image.norm(value)) for value in (0.5, 0.95, 1.0, 1.17, 2.0)]
    assert place == pytest.approx([0.0, 0.463, 0.5, 0.6133, 1.0], abs=1e-3)
    assert "← cheaper" in bar.get_ylabel()
    assert "more expensive →" in bar.get_ylabel()
    assert "1" in [text.get_text() for text in bar.get_yticklabels()]
    assert (panel.get_xlabel(), panel.get_ylabel()) == (
        *("sequence length N (tokens)", "model width D"),
    )
    assert panel.get_title().startswith("FiSH, 8 heads from 2 score maps\n")
    shown = {text.get_text() for text in panel.texts}
    assert {"0.95", "1.17", f"{largest:.2f}"} == shown


@pytest.mark.parametrize("widths", [(64, 128), (64,)], ids=["heat maps", "lines"])
def test_a_panel_has_one_batch_size(widths):
    """Not the mean over batch sizes, which nobody measured."""
    parts = [
        ratios({8: ratio, 16: ratio}, widths=widths).assign(batch_size=size)
        for size, ratio in ((1, 0.9), (32, 0.5))
    ]
    found = figures._quantities(sweep(), pd.concat(parts), ["embed_dim", "seq_len"])
    (table,) = found.values()
    assert set(table["ratio_measured"]) == {0.9}
    one = figures.ratio_figure(found, NAMES, [1, 32])
    assert one.caption.endswith("Batch size 1; the tables also have 32.")


def test_each_number_of_heads_has_its_own_heat_map():
    parts = [
        ratios({8: ratio, 16: ratio}).assign(grid_heads=heads)
        for heads, ratio in ((4, 0.9), (8, 0.5))
    ]
    first, second, _ = drawn(pd.concat(parts)).axes
    assert first.get_title().startswith("FiSH, 8 heads from 2 score maps, heads = 4\n")
    assert {text.get_text() for text in first.texts} == {"0.90"}
    assert {text.get_text() for text in second.texts} == {"0.50"}


@pytest.mark.parametrize("widths", [(64, 128), (64,)], ids=["heat maps", "lines"])
def test_titles_are_as_narrow_as_their_panels(widths):
    names = ("macs", "memory_bytes", "peak_memory_bytes")
    parts = {
        Quantity(name, "attention", "train"): ratios({8: 0.9, 16: 0.8}, name, 0.9, widths)
        for name in names
    }
    figure = figures.ratio_figure(parts, NAMES).drawn()
    figure.draw_without_rendering()
    for axis in figure.axes[: len(names)]:
        assert axis.title.get_window_extent().width <= axis.get_window_extent().width


def test_small_ratios_begin_at_zero_and_large_ones_are_logarithmic():
    small, large = (
        drawn(ratios(values, widths=(64,))).axes[0]
        for values in ({8: 0.9, 16: 0.7}, {8: 0.95, 16: 17.0})
    )
    assert (small.get_yscale(), small.get_ylim()) == ("linear", (0.0, 1.1))
    assert large.get_yscale() == "log"
    low, high = large.get_ylim()
    assert low < 0.95 < 1.0 < 17.0 < high
    assert small.get_ylabel() == "ratio (below 1 = cheaper)"
    assert {line.get_color() for line in small.lines[:-1]} == {colour_of("fish")}


@pytest.mark.parametrize(
    ("metric", "predicted", "words"),
    [
        ("macs", None, "dots counted, curves closed form"),
        ("peak_memory_bytes", 0.9, "dots measured, curves predicted"),
    ],
)
def test_words_say_how_numbers_were_found(metric, predicted, words):
    table = ratios({8: 0.9, 16: 0.8}, metric, predicted, widths=(64,))
    title = drawn(table, Quantity(metric, "model", "train")).axes[0].get_title()
    assert words in " ".join(title.split())


def test_the_claim_and_the_caption_are_computed_from_the_rows():
    one = figures.ratio_figure({MACS: ratios({8: 0.91, 16: 0.72})}, NAMES)
    assert one.claim == (
        "FiSH, 8 heads from 2 score maps: 0.72 to 0.91 of the multiply-adds of softmax, 8 heads "
        "(model, training step)"
    )
    assert "Ratios to softmax, 8 heads at the same" in one.caption
    assert "4 ratios, counted" in one.caption
    other = figures.ratio_figure({MACS: ratios({8: 0.5, 16: 0.5})}, NAMES)
    assert "0.50 of the multiply-adds" in other.claim


def rows(config: SweepConfig, time=None):
    """Rows of a sweep over two lengths, with macs and perhaps a time for each point."""
    found = []
    for name, entry in config.variants.items():
        for length in (8, 16):
            share = 1.0 if config.baseline_of(name) is None else 0.5
            row = {
                **{"variant": name, "baseline": config.baseline_of(name), "status": "ok"},
                **{"attention_class": "MGKAttention" if share < 1 else "SoftmaxAttention"},
                **{"attention_args": "{}", "num_heads": 2, "embed_dim": 8, "seq_len": length},
                **{"grid_heads": None, "batch_size": 1, "mode": "eval", "backend": "reference"},
                **{"dtype": "float32", "device": "cpu", "device_name": "a processor"},
                **{"scope": "model", "source": "measured", "macs": share * length},
                **{"num_parameters": int(100 * share), "entry": entry},
            }
            times = None if time is None else time * (1.0 if share == 1.0 else 1.5)
            row |= {"time_median_s": times}
            row |= {"time_p20_s": times and 0.9 * times, "time_p80_s": times and 1.2 * times}
            found.append(row)
    return pd.DataFrame(found)


def two():
    variants = {"softmax": attention(), "mgk": attention(MGK)}
    return sweep(variants=variants, grid={"embed_dim": [8], "seq_len": [8, 16]})


def test_a_sweep_has_at_most_two_figures_and_the_second_needs_times():
    config = two()
    counted, timed = rows(config), rows(config, time=0.25)
    names = [list(figures.figures_of(config, t, ratio_table(t))) for t in (counted, timed)]
    assert names == [["figure"], ["figure", "operations_and_time"]]
    table = ratio_table(timed)
    found = figures.figures_of(config, timed, table, ratios_drawn=False)
    one = found.pop("operations_and_time")
    assert not found
    assert one.claim == "MGK, 2 heads: 0.50 of the multiply-adds, 1.50 of the time"
    assert "Ratios to softmax, 2 heads" in one.caption
    assert "on a processor" in one.caption
    assert "2 points" in one.caption
    figure = one.drawn()
    assert [axis.get_title() for axis in figure.axes] == [
        *("forward pass, N = 8", "forward pass, N = 16"),
    ]
    (bar,) = [c for c in figure.axes[0].containers if c.has_xerr]
    ends = bar[2][0].get_segments()[0][:, 0]
    assert ends == pytest.approx([1.5 * 0.9 / 1.2, 1.5 * 1.2 / 0.9])


def test_all_panels_of_operations_and_time_contain_their_values():
    """Eight settings, whose ratios of time rise from 1.5 to 9: six are drawn, in one scale."""
    variants = {"softmax": attention(), "mgk": attention(MGK)}
    lengths = [8 * (place + 1) for place in range(8)]
    config = sweep(variants=variants, grid={"embed_dim": [8], "seq_len": lengths})
    frame = pd.concat([rows(config, time=0.25).assign(seq_len=length) for length in lengths])
    frame = frame.drop_duplicates(["variant", "seq_len"])
    mgk = frame["variant"] == "mgk"
    for column in ("time_median_s", "time_p20_s", "time_p80_s"):
        frame.loc[mgk, column] *= frame.loc[mgk, "seq_len"] / 8
    one = figures.together_figure(
        figures._operations_and_time(config, frame), figures.plain_names(frame)
    )
    assert one.caption.endswith("8 points. 6 of 8 settings are drawn.")
    figure = one.drawn()
    told = [axis.get_title() for axis in figure.axes]
    assert told[0] == "forward pass, N = 8"
    assert told[-1] == "forward pass, N = 64"
    assert len(told) == 6
    assert [axis.get_xlim()[0] for axis in figure.axes] == [0.0] * 6
    assert min(axis.get_xlim()[1] for axis in figure.axes) > 8 * 1.5 * 1.2 / 0.9


def test_a_single_point_has_no_figure():
    config = two()
    frame = rows(config)
    frame = frame[frame["seq_len"] == 8]
    assert figures.figures_of(config, frame, ratio_table(frame)) == {}


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


def test_operations_stand_beside_the_time_of_their_backend():
    """The reference, whose products are fewer, has no times at the second length."""
    config = two()
    written = rows(config, time=0.25)
    written.loc[written["seq_len"] == 16, "time_median_s"] = None
    fused = rows(config, time=0.25).assign(backend="auto")
    fused.loc[fused["variant"] == "mgk", "macs"] *= 1.5
    both = figures._operations_and_time(config, pd.concat([written, fused], ignore_index=True))
    assert both.set_index("seq_len")["macs"].to_dict() == {8: 0.5, 16: 0.75}
    caption = figures.together_figure(both, figures.plain_names(written)).caption
    assert "with backend auto, reference" in caption


def test_of_several_backends_and_dtypes_the_first_of_the_grid_is_drawn():
    """By the order in the file, not by the alphabet, and the captions name both."""
    grid = {"embed_dim": [8], "seq_len": [8, 16], "backend": ["reference", "blockwise"]}
    config = two().model_copy(
        update={"grid": Grid.model_validate({**grid, "dtype": ["float32", "bfloat16"]})}
    )
    tables = []
    for backend, dtype in product(("blockwise", "reference"), ("bfloat16", "float32")):
        table = rows(config, time=0.25).assign(backend=backend, dtype=dtype)
        factor = 1.0 if (backend, dtype) == ("reference", "float32") else 3.0
        table.loc[table["variant"] == "mgk", ["macs", "time_median_s"]] *= factor
        tables.append(table)
    frame = pd.concat(tables, ignore_index=True)
    found = figures.figures_of(config, frame, ratio_table(frame))
    assert all("with backend reference in float32" in one.caption for one in found.values())
    assert found["figure"].claim.startswith("MGK, 2 heads: 0.50 of the multiply-adds")
    wanted = "MGK, 2 heads: 0.50 of the multiply-adds, 1.50 of the time"
    assert found["operations_and_time"].claim == wanted


def three():
    variants = {"softmax": attention(), "mgk": attention(MGK), "other": attention(MGK)}
    return sweep(variants=variants, grid={"embed_dim": [8], "seq_len": [8, 16]})


def test_variants_with_one_name_are_followed_by_their_keys():
    frame = rows(three())
    names = {"softmax": "softmax, 2 heads"}
    names |= {key: f"MGK, 2 heads ({key})" for key in ("mgk", "other")}
    assert figures.plain_names(frame) == names


def test_a_variant_has_the_colour_of_the_legend_where_others_have_no_values():
    """`other` has counts, but no times."""
    config = three()
    frame = rows(config, time=0.25)
    frame.loc[frame["variant"] == "mgk", "time_median_s"] = None
    found = figures.figures_of(config, frame, ratio_table(frame))["figure"].drawn()
    (legend,) = found.legends
    colours = {
        text.get_text(): line.get_color()
        for text, line in zip(legend.get_texts(), legend.get_lines(), strict=True)
    }
    assert len(set(colours.values())) == 2
    times = found.axes[-1]
    assert times.get_title().startswith("time")
    lines = {line.get_color() for line in times.lines if len(line.get_xdata()) == 2}
    assert colours["MGK, 2 heads (other)"] in lines
    assert colours["MGK, 2 heads (mgk)"] not in lines
