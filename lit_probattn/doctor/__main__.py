"""Check this machine: versions, devices, contact between processes, data, space, backends.

    python -m lit_probattn.doctor
    python -m lit_probattn.doctor --data_dir /data --json

`ok` is as it should be, `note` is worth knowing (missing data, no GPU), `problem` will stop a run.
The exit status is 1 if there is a problem, else 0.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from itertools import groupby

from lit_probattn.doctor.data import check_data
from lit_probattn.doctor.machine import check_devices, check_space, check_versions
from lit_probattn.doctor.reach import check_contact
from lit_probattn.doctor.variants import check_backends, check_kernels


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the findings; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m lit_probattn.doctor",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--data_dir", help="folder of releases; default as for a run")
    parser.add_argument("--cache_dir", help="folder of caches; default as for a run")
    parser.add_argument("--root", default="runs", help="folder of runs")
    parser.add_argument(
        "--timeout", type=float, default=60.0, help="seconds per contact; 0 skips the contacts"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    findings = [
        *(*check_versions(), *check_devices()),
        *(check_contact(options.timeout) if options.timeout > 0 else ()),
        *check_data(options.data_dir, options.cache_dir),
        *check_space(options.data_dir, options.cache_dir, options.root),
        *(*check_backends(), *check_kernels()),
    ]
    problems = sum(finding.status == "problem" for finding in findings)
    if options.json:
        print(json.dumps([finding._asdict() for finding in findings], indent=2))
    else:
        for section, lines in groupby(findings, key=lambda finding: finding.section):
            print(f"\n{section}")
            for finding in lines:
                print(f"  {finding.status:8}{finding.name}: {finding.text}")
        print(f"\n{problems} problem{'' if problems == 1 else 's'}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
