"""Count the twelve habits per kind or file, or draw sentences at random.

python -m tests.voice                          # hits by kind, accepted ones left out
python -m tests.voice --files                  # hits of every file that has some
python -m tests.voice --list page              # the sentences that have a hit
python -m tests.voice --draw 150 --seed 7 --kinds page
"""

from __future__ import annotations

import argparse
import random
from collections import Counter
from pathlib import Path

from tests.voice.patterns import PATTERNS, habits
from tests.voice.sentences import KINDS, Sentence, of_repository

ACCEPTED = Path(__file__).with_name("accepted.txt")


def accepted() -> set[str]:
    """Return sentences whose hits are right as they stand."""
    return set(ACCEPTED.read_text(encoding="utf-8").splitlines())


def print_counts(sentences: list[Sentence]) -> None:
    """Print sentences, hits of each habit and sentences with a hit, by kind."""
    hits = Counter((s.kind, name) for s in sentences for name in habits(s.text))
    rows = [("sentences", Counter(s.kind for s in sentences))]
    rows += [(p.name, Counter({k: hits[k, p.name] for k in KINDS})) for p in PATTERNS]
    rows += [("with a hit", Counter(s.kind for s in sentences if habits(s.text)))]
    print(f"{'':22}" + "".join(f"{kind:>11}" for kind in KINDS))
    for name, counts in rows:
        print(f"{name:22}" + "".join(f"{counts[kind]:11}" for kind in KINDS))


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m tests.voice", description=__doc__)
    parser.add_argument("--root", type=Path, default=Path(), help="checkout to read")
    parser.add_argument("--files", action="store_true", help="print the hits of each file")
    parser.add_argument("--list", choices=KINDS, help="print each sentence of a kind with a hit")
    parser.add_argument("--draw", type=int, help="number of sentences to draw")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draw")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="kinds to draw")
    parser.add_argument("--changelog", action="store_true", help="include CHANGELOG.md")
    options = parser.parse_args()
    known = accepted()
    every = of_repository(options.root, options.changelog)
    open_ones = [s for s in every if s.text not in known]
    if options.draw:
        population = [s for s in every if s.kind in options.kinds]
        for number, s in enumerate(
            random.Random(options.seed).sample(population, min(options.draw, len(population))), 1
        ):
            print(f"{number}\t{s.kind}\t{s.file}:{s.line}\t{s.text}")
    elif options.list:
        for s in open_ones:
            if s.kind == options.list and habits(s.text):
                print(f"{s.file}:{s.line}\t{', '.join(habits(s.text))}\t{s.text}")
    elif options.files:
        for file, count in Counter(s.file for s in open_ones if habits(s.text)).most_common():
            print(f"{count:5}  {file}")
    else:
        print_counts(open_ones)


if __name__ == "__main__":
    main()
