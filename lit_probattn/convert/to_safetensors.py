"""Write the weights of a checkpoint: `lit-probattn convert --to safetensors`."""

import sys
from pathlib import Path

from lit_probattn.base.arguments import Parser
from lit_probattn.base.errors import reports
from lit_probattn.training.checkpoints import CheckpointError, export_safetensors


@reports(CheckpointError)
def main(arguments: list[str] | None = None) -> int:
    """Run the command; return the exit status."""
    parser = Parser("lit-probattn convert", __doc__)
    parser.add_argument("--to", choices=["safetensors"], help="format")
    parser.add_argument("checkpoint", type=Path, help="checkpoint or run folder")
    parser.add_argument("output", type=Path, help=".safetensors file to write")
    options = parser.parse_args(arguments)
    count = export_safetensors(options.checkpoint, options.output)
    print(f"wrote {count} tensors to {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
