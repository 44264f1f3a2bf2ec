"""Fuzz for a while, and say how many examples were refused and accepted."""

from __future__ import annotations

import argparse
import itertools
import os
import time

from tests.fuzzing.targets import all_targets
from tests.support.caches import keep_out_of_the_users_cache

EXAMPLES_PER_ROUND = 200


def main() -> None:
    """Run the targets in turns."""
    keep_out_of_the_users_cache()
    targets = all_targets()
    parser = argparse.ArgumentParser(prog="python -m tests.fuzzing")
    parser.add_argument("names", nargs="*", help=f"of {', '.join(targets)}; default: all")
    parser.add_argument("--seconds", type=float, default=60.0, help="in all")
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4)))
    options = parser.parse_args()
    chosen = [targets[name] for name in options.names or targets]
    print(f"seed {options.seed}", flush=True)
    for place, target in enumerate(chosen):
        end = time.monotonic() + options.seconds / len(chosen)
        for number in itertools.count(options.seed + 1000 * place):
            target.run(EXAMPLES_PER_ROUND, number, until=end)
            if time.monotonic() > end:
                break
        answers = ", ".join(f"{count} {answer}" for answer, count in sorted(target.answers.items()))
        print(f"{target.name}: {sum(target.answers.values())} examples: {answers}", flush=True)


if __name__ == "__main__":
    main()
