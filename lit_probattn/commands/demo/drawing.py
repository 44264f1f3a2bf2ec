"""SVG figures of the demo's page: curves, and attention maps with labelled cells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from torch import Tensor

COLOURS = ("#4477aa", "#cc6677")
_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 640, 260, 48, 24, 36
_CELL, _EDGE = 13, 44  # of a map: cell size, and margin for tokens


def curves(lines: Mapping[str, Sequence[tuple[float, float]]], title: str, unit: str = "%") -> str:
    """Return curves from (0, 0) up to 100 of `unit`, over steps, with values as tooltips."""
    last = max((x for points in lines.values() for x, _ in points), default=0) or 1
    across, down = _WIDTH - _LEFT - 12, _HEIGHT - _TOP - _BOTTOM

    def place(x: float, y: float) -> tuple[float, float]:
        return _LEFT + across * x / last, _TOP + down * (1 - y / 100)

    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" class="curves">']
    parts += [f"<title>{escape(title)}</title>"]
    for level in range(0, 101, 25):
        _, y = place(0, level)
        parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH - 12}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(
            f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{level} {unit}</text>'
        )
    for quarter in range(5):
        x, y = place(last * quarter / 4, 0)
        shown = f"{last * quarter / 4:.0f}" + (" steps" if quarter == 4 else "")
        anchor = "end" if quarter == 4 else "middle"
        parts.append(f'<text x="{x:.1f}" y="{y + 18:.1f}" text-anchor="{anchor}">{shown}</text>')
    for number, (name, points) in enumerate(lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        placed = [place(x, y) for x, y in points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
        parts.append(f'<polyline points="{path}" stroke="{colour}"/>')
        for (x, y), (step, value) in zip(placed, points, strict=True):
            label = escape(f"{name}, step {step:.0f}: {value:.1f} {unit}")
            dot = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}">'
            parts.append(f"{dot}<title>{label}</title></circle>")
        x = _LEFT + 8 + 150 * number
        parts.append(
            f'<text x="{x}" y="14" style="fill: {colour}; font-weight: 600">— {escape(name)}</text>'
        )
    return "".join([*parts, "</svg>"])


def attention_map(weights: Tensor, words: Sequence[str], name: str, colour: str) -> str:
    """Return a map (N, N): rows are queries, columns keys; darkness is relative to the maximum."""
    size = _EDGE + _CELL * len(words)
    largest = max(float(weights.max()), 1e-9)
    parts = [f'<figure><svg viewBox="0 0 {size} {size}" width="{size}" class="map">']
    for number, word in enumerate(words):
        at = _EDGE + _CELL * number
        shown = escape(word)
        parts.append(f'<text x="{_EDGE - 4}" y="{at + 10}" text-anchor="end">{shown}</text>')
        turned = f'transform="translate({at + 10} {_EDGE - 4}) rotate(-90)"'
        parts.append(f"<text {turned}>{shown}</text>")
    parts.append(f'<g fill="{colour}">')
    for row, (query, values) in enumerate(zip(words, weights.tolist(), strict=True)):
        for column, (key, value) in enumerate(zip(words, values, strict=True)):
            place = f'x="{_EDGE + _CELL * column}" y="{_EDGE + _CELL * row}"'
            size_of = f'width="{_CELL}" height="{_CELL}" fill-opacity="{value / largest:.2f}"'
            label = escape(
                f"{query} (position {row + 1}) → {key} (position {column + 1}): {value:.3f}"
            )
            parts.append(f"<rect {place} {size_of}><title>{label}</title></rect>")
    parts.append(f"</g></svg><figcaption>{escape(name)}; maximum {largest:.2f}</figcaption>")
    return "".join([*parts, "</figure>"])
