"""`python -m lit_probattn`."""

import sys

from lit_probattn.cli import main

if __name__ == "__main__":
    sys.exit(main())
