"""`python -m lit_probattn.convert`."""

import sys

from lit_probattn.convert.to_mgk import main

if __name__ == "__main__":
    sys.exit(main())
