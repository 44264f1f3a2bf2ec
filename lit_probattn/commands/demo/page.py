"""The demo's page: curves, costs, a sample with its attention maps, next steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

import torch

from datamodules.expressions import Expressions
from lit_probattn.analysis.recording import record
from lit_probattn.base.provenance import machine
from lit_probattn.commands.demo.cost import Quantity
from lit_probattn.commands.demo.drawing import COLOURS, attention_map, curves
from lit_probattn.commands.demo.training import BATCH, Side
from lit_probattn.records.html import page

NEXT = (
    (
        "Compare both with three seeds and confidence intervals (about ten minutes)",
        "lit-probattn compare --task tiny/lra_listops --attention softmax smgk --seeds 0 1 2",
    ),
    ("List all variants", "lit-probattn list attention"),
    (
        "Use the layer in your own model",
        "python -c \"import lit_probattn; print(lit_probattn.create('smgk', 256, 4))\"",
    ),
)
_LONGEST = 15  # maximum number of tokens of the sample
_STYLE = """
svg text { font-size: 11px; fill: #444; } svg.map text { font: 10px ui-monospace, monospace; }
svg.curves { width: 100%; max-width: 640px; } svg.curves line { stroke: #ddd; }
svg.curves polyline { fill: none; stroke-width: 2; }
svg.map rect { stroke: #eee; stroke-width: .5; } svg.map rect:hover { stroke: #000; }
figure { display: inline-block; margin: 0 1rem 1rem 0; }
figcaption { font-size: .8rem; color: #555; }
.bars { display: grid; grid-template-columns: repeat(10, 2.4rem); gap: 2px; align-items: end;
        height: 6rem; margin: .3rem 0 1.6rem; }
.bars div { position: relative; background: #bbb; min-height: 1px; }
.bars span { position: absolute; top: 100%; width: 100%; text-align: center; font-size: .75rem; }
.bars .right { background: #228833; } .less { color: #228833; } .more { color: #bb3311; }
.sample { font: 1.1rem ui-monospace, monospace; overflow-wrap: anywhere; }
pre { background: #f4f4f4; padding: .5rem .8rem; overflow-x: auto; } pre code { padding: 0; }
"""


def write(
    sides: Sequence[Side], costs: Sequence[Quantity], test: Expressions, finished: bool
) -> str:
    """Return the page."""
    steps = len(sides[0].losses)
    names = " and ".join(side.name for side in sides)
    stopped = "" if finished else " Training was interrupted; these are partial results."
    body = [
        "<h1>Two attention layers learn the same task</h1>",
        f"<p>Two tiny transformers, {escape(names)}, learned to evaluate nested MIN and MAX of "
        f"digits from the same batches: {steps} steps of {BATCH} expressions each, one seed."
        f"{stopped} This shows that both learn, not which one is better.</p>",
        f"<h2>Learning</h2><p>Accuracy on {len(test.values)} unseen expressions.</p>",
        curves({s.name: [(n, 100 * share) for n, share in s.accuracy] for s in sides}, "accuracy"),
        "<h2>Cost</h2>",
        *_costs(sides, costs),
        *_sample(sides, test),
        "<h2>Next</h2>",
        *(f"<p>{escape(why)}:</p><pre><code>{escape(how)}</code></pre>" for why, how in NEXT),
        f"<p><small>{escape(machine())}</small></p>",
    ]
    return page("lit-probattn demo", "\n".join(body), style=_STYLE)


def _costs(sides: Sequence[Side], costs: Sequence[Quantity]) -> Iterator[str]:
    first, last = sides[0].name, sides[-1].name
    yield f"<p>{escape(summary(costs, first, last))}</p>"
    heads = "".join(f"<th>{escape(side.name)}</th>" for side in sides)
    yield f"<table><tr><th></th>{heads}<th>ratio</th><th></th></tr>"
    for cost in costs:
        cells = "".join(f"<td>{value:,.{cost.digits}f}</td>" for value in cost.values)
        kind = "less" if cost.ratio < 1 else "more"
        ratio = f'<td class="{kind}">{cost.ratio:.2f}</td>'
        yield f"<tr><td>{escape(cost.name)}</td>{cells}{ratio}<td>{cost.how}</td></tr>"
    yield "</table>"


def summary(costs: Sequence[Quantity], first: str, last: str) -> str:
    """Return a sentence with the quantities that are lower for the last model, and the others."""
    parts = []
    for word, wanted in (("less", True), ("not less", False)):
        found = [cost.name for cost in costs if (cost.ratio < 1) is wanted]
        if found:
            parts.append(f"{last} needs {word} than {first} in: {'; '.join(found)}.")
    return " ".join(parts)


def sample_of(test: Expressions) -> int:
    """Return the index of the longest expression with a readable map."""
    lengths = (test.tokens > 0).sum(1)
    fitting = torch.where(lengths <= _LONGEST, lengths, 0)
    return int(fitting.argmax())


def _sample(sides: Sequence[Side], test: Expressions) -> Iterator[str]:
    index = sample_of(test)
    words = test.words(index)
    tokens, value = test.tokens[index : index + 1, : len(words)], int(test.values[index])
    yield "<h2>A sample</h2>"
    yield f'<p class="sample">{escape(" ".join(words))} = {value}</p>'
    maps = []
    for side, colour in zip(sides, COLOURS, strict=False):
        with record(side.model) as calls:
            shares = side.probabilities(tokens)[0]
        guess = int(shares.argmax())
        verdict = "right" if guess == value else "wrong"
        yield f"<p>{escape(side.name)} predicts <b>{guess}</b> ({verdict}), with probabilities:</p>"
        yield _bars(shares.tolist(), value)
        maps.append(f"<h3>{escape(side.name)}</h3>")
        for layer, call in enumerate(calls, 1):
            for head, weights in enumerate(call.weights()[0], 1):
                maps.append(attention_map(weights, words, f"layer {layer}, head {head}", colour))
    yield (
        "<h2>Attention maps</h2><p>Rows are queries, columns are keys; hover over a cell for its "
        "tokens and weight.</p>"
    )
    yield from maps


def _bars(shares: Sequence[float], value: int) -> str:
    """Return the probabilities of the ten values as bars, with the correct one highlighted."""
    bars = [
        f'<div style="height:{100 * share:.0f}%" title="{number}: {100 * share:.1f} %"'
        f"{' class=right' if number == value else ''}><span>{number}</span></div>"
        for number, share in enumerate(shares)
    ]
    return f'<div class="bars">{"".join(bars)}</div>'
