"""`lit-probattn convert`: other attention, transformers' files, safetensors, other sizes."""

import sys
from importlib import import_module

from lit_probattn.base.progress import prepare_streams

_OTHERS = {
    "from_transformers": "from_transformers",
    "to_transformers": "to_transformers",
    "prune": "prune.command",
    "wider_heads": "wider_heads",
}
_SAFETENSORS = ["--to", "safetensors"]


def main(arguments: list[str] | None = None) -> int:
    """Run the conversion that the first word or `--to safetensors` selects; MGK by default."""
    prepare_streams()
    words = sys.argv[1:] if arguments is None else list(arguments)
    name = _OTHERS[words.pop(0)] if words[:1] and words[0] in _OTHERS else "to_mgk"
    if "--to=safetensors" in words or _SAFETENSORS in [words[i : i + 2] for i in range(len(words))]:
        name = "to_safetensors"
    status: int = import_module(f"lit_probattn.convert.{name}").main(words)
    return status


if __name__ == "__main__":
    sys.exit(main())
