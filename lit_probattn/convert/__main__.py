"""`python -m lit_probattn.convert`: dispatches to the conversions."""

import sys
from importlib import import_module

_OTHERS = {
    "from_transformers": "from_transformers",
    "to_transformers": "to_transformers",
    "prune": "prune.command",
}


def main(arguments: list[str] | None = None) -> int:
    """Run the conversion named by the first word; the default converts to MGK."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    named = words[:1] and words[0] in _OTHERS
    module = import_module(f"lit_probattn.convert.{_OTHERS[words.pop(0)] if named else 'to_mgk'}")
    status: int = module.main(words)
    return status


if __name__ == "__main__":
    sys.exit(main())
