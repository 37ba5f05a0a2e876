"""The command line that the benchmarks start, as a user has it: in this interpreter, from this repository."""

import sys

PENSTOCK = [sys.executable, "-c", "import sys; from pipeline.cli import main; sys.exit(main(sys.argv[1:]))"]
