"""Make three small splits of WikiText-2's test and validation texts: python split.py FROM TO.

FROM has wiki.test.tokens and wiki.valid.tokens; TO gets wiki.{train,valid,test}.tokens. Articles
stay whole: all of the test text and the first of the validation text are for training.
"""

import re
import sys
from pathlib import Path


def articles(path: Path) -> list[str]:
    """Return the articles of a file, each with its heading."""
    lines = path.read_text().splitlines(keepends=True)
    starts = [i for i, line in enumerate(lines) if re.match(r" = [^=].*[^=] = \n$", line)]
    return ["".join(lines[a:b]) for a, b in zip(starts, [*starts[1:], len(lines)], strict=True)]


def main() -> None:
    """Write the splits and say how large they are."""
    source, target = map(Path, sys.argv[1:])
    more = articles(source / "wiki.valid.tokens")
    parts = {
        "train": articles(source / "wiki.test.tokens") + more[:-8],
        "valid": more[-8:-4],
        "test": more[-4:],
    }
    target.mkdir(parents=True, exist_ok=True)
    for name, texts in parts.items():
        (target / f"wiki.{name}.tokens").write_text("\n" + "".join(texts))
        print(f"{name}: {len(texts)} articles, {sum(len(t.split()) for t in texts):,} words")


if __name__ == "__main__":
    main()
