"""Print the page of bad inputs, or write it."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import tempfile
from pathlib import Path

from tests.bad_inputs import all_cases, message_of, page
from tests.support.caches import keep_out_of_the_users_cache


def main() -> None:
    """Run every case."""
    keep_out_of_the_users_cache()
    os.environ.pop("LIT_PROBATTN_DATA", None)  # a case is about data that are nowhere
    parser = argparse.ArgumentParser(prog="python -m tests.bad_inputs")
    parser.add_argument("--write", type=Path, help="file to write; without it, print")
    target = parser.parse_args().write
    rows = []
    with tempfile.TemporaryDirectory() as name:
        for number, case in enumerate(all_cases()):
            try:
                with contextlib.redirect_stdout(io.StringIO()):  # the page is all that is printed
                    rows.append((case, message_of(case, Path(name) / str(number))))
            except AssertionError as error:
                raise SystemExit(f"{case.area}: {case.given}: {error}") from error
    text = page(rows)
    if target is None:
        print(text)
    else:
        target.write_text(text, encoding="utf-8")
        print(f"{target}: {len(rows)} cases")


if __name__ == "__main__":
    main()
