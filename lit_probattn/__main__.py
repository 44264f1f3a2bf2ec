"""`python -m lit_probattn`."""

import sys

from lit_probattn.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
