"""A result file as one line of rows.csv."""

from __future__ import annotations

from typing import Any


def flat_result(result: dict[str, Any]) -> dict[str, Any]:
    """Return what rows.csv says of a finished cell."""
    hardware, git = result.get("hardware") or {}, result.get("git") or {}
    gpus = [gpu["name"] for gpu in hardware.get("gpus") or []]
    backends = result.get("backends") or {}
    on_gpu = any("(cuda" in call for call in backends)
    packages = result.get("packages") or {}
    shown = ("torch", "lightning", "triton", "lit-probattn")
    versions = [f"{name} {packages[name]}" for name in shown if packages.get(name)]
    return {
        **{key: result[key] for key in ("task", "row", "seed")},
        **{f"value {name}": value for name, value in result["values"].items()},
        **{
            key: result[key]
            for key in (
                *(
                    "parameters",
                    "macs",
                    "macs_published_length",
                    "num_test",
                    "max_steps",
                    "selected_step",
                ),
                *("selected_step", "selected_on_test", "num_starts", "fit_seconds_of_last_start"),
            )
        },
        "backends": "; ".join(f"{call}: {name}" for call, name in backends.items()),
        "device": gpus[0]
        if on_gpu and gpus
        else f"{hardware.get('processor')}, {hardware.get('num_cores')} cores",
        "versions": ", ".join([f"python {result.get('python')}", *versions]),
        "git_revision": f"{str(git.get('revision'))[:7]}{'+' if git.get('dirty') else ''}",
        "run_folder": result["run_folder"],
        "command": result["command"],
    }
