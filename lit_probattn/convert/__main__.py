"""`lit-probattn convert`: other attention, transformers' files, safetensors, other sizes."""

import sys
from importlib import import_module

from lit_probattn.base.arguments import Parser
from lit_probattn.base.errors import ConfigError, reports
from lit_probattn.base.progress import prepare_streams
from lit_probattn.training.checkpoints import CheckpointError

_OTHERS = {
    "from_transformers": "from_transformers",
    "to_transformers": "to_transformers",
    "prune": "prune.command",
    "wider_heads": "wider_heads",
}
_SAFETENSORS = ["--to", "safetensors"]


@reports(CheckpointError, ConfigError)
def main(arguments: list[str] | None = None) -> int:
    """Run the conversion that the first word or `--to safetensors` selects; MGK by default."""
    prepare_streams()
    words = sys.argv[1:] if arguments is None else list(arguments)
    title = words.pop(0) if words[:1] and words[0] in _OTHERS else ""
    name = _OTHERS.get(title, "to_mgk")
    if "--to=safetensors" in words or _SAFETENSORS in [words[i : i + 2] for i in range(len(words))]:
        title, name = "", "to_safetensors"
    conversion = import_module(f"lit_probattn.convert.{name}")
    parser = Parser(f"lit-probattn convert {title}".rstrip(), conversion.__doc__)
    conversion.add_arguments(parser)
    print("\n".join(conversion.run(parser.parse_args(words))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
