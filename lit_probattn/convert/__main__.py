"""`python -m lit_probattn.convert`: softmax to others, or from and to the files of transformers."""

import sys
from importlib import import_module

_OTHERS = ("from_transformers", "to_transformers")


def main(arguments: list[str] | None = None) -> int:
    """Run the conversion that the first word names, to MGK without such a word."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    named = words[:1] and words[0] in _OTHERS
    module = import_module(f"lit_probattn.convert.{words.pop(0) if named else 'to_mgk'}")
    status: int = module.main(words)
    return status


if __name__ == "__main__":
    sys.exit(main())
