"""Look at this machine: versions, devices, contact between processes, data, space, backends.

    python -m lit_probattn.doctor
    python -m lit_probattn.doctor --data_dir /data --json

`ok` is as it should be, `note` is worth knowing (data that are not there, no GPU), `problem` will
stop a run. The exit status is 1 if there is a problem, else 0.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from lit_probattn.doctor.data import check_data
from lit_probattn.doctor.findings import Finding
from lit_probattn.doctor.machine import check_devices, check_space, check_versions
from lit_probattn.doctor.reach import check_contact
from lit_probattn.doctor.variants import check_backends, check_kernels


def examine(options: argparse.Namespace) -> list[Finding]:
    """Run every check."""
    findings = [*check_versions(), *check_devices()]
    if options.timeout > 0:
        findings += check_contact(options.timeout)
    findings += check_data(options.data_dir, options.cache_dir)
    findings += check_space(options.data_dir, options.cache_dir, options.root)
    return [*findings, *check_backends(), *check_kernels()]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the findings; returns the exit status."""
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
        "--timeout", type=float, default=60.0, help="seconds for each contact; 0 leaves them out"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    findings = examine(options)
    problems = sum(finding.status == "problem" for finding in findings)
    if options.json:
        print(json.dumps([vars(finding) for finding in findings], indent=2))
    else:
        section = ""
        for finding in findings:
            if finding.section != section:
                section = finding.section
                print(f"\n{section}")
            print(f"  {finding.status:8}{finding.name}: {finding.text}")
        print(f"\n{problems} problems" if problems != 1 else "\n1 problem")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
