"""The figures of the head-size experiment."""

from __future__ import annotations

import pandas as pd
import pytest

from lit_probattn.reproduce.head_size.experiment import draw_heads


@pytest.mark.parametrize("seeds", [1, 2])
def test_untrained_models_do_not_look_different_for_their_head_size(seeds):
    """Values of models that have learned nothing; a tenth of the value is the least width."""
    points = [("standard", 4, 718.85), ("standard", 16, 718.82), ("fixed", 16, 716.53)]
    rows = [
        {"rule": rule, "num_heads": heads, "perplexity": value + 2 * seed}
        for rule, heads, value in points
        for seed in range(seeds)
    ]
    axis = draw_heads(pd.DataFrame(rows)).axes[0]
    low, high = axis.get_ylim()
    assert high - low >= (70.0 if seeds == 1 else 10 * 2**0.5)
    bars = [bar for bar in axis.containers if bar.has_yerr]
    assert len(bars) == (0 if seeds == 1 else 2)
