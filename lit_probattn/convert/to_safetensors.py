"""Write the weights of a checkpoint: `lit-probattn convert --to safetensors`."""

import argparse
from pathlib import Path

from lit_probattn.base.arguments import Parser
from lit_probattn.training.checkpoints import export_safetensors


def add_arguments(parser: Parser) -> None:
    """Add the arguments of `run`."""
    parser.add_argument("--to", choices=["safetensors"], help="format")
    parser.add_argument("checkpoint", type=Path, help="checkpoint or run folder")
    parser.add_argument("output", type=Path, help=".safetensors file to write")


def run(options: argparse.Namespace) -> list[str]:
    """Write the file; return the line to print."""
    count = export_safetensors(options.checkpoint, options.output)
    return [f"wrote {count} tensors to {options.output}"]
