"""`python -m penstock`: the command line without the console script."""

import sys

from penstock.pipeline.cli import main

if __name__ == "__main__":
    sys.exit(main())
