"""`python -m penstock.workers ROLE --run RUN --bootstrap HOST:PORT`: one worker process."""

import gc
import sys

from penstock.infra.sandbox.signals import keep_ignored_here
from penstock.pipeline.runtime.main import main
from penstock.pipeline.runtime.reporting.log_lines import visible_errors

GC_OBJECTS = 1_000_000
"""New objects between two garbage collections until a worker is ready. At Python's 700 they take a quarter of the import of vLLM."""

if __name__ == "__main__":
    keep_ignored_here()
    gc.set_threshold(GC_OBJECTS)
    with visible_errors():
        status = main(sys.argv[1:])
    gc.freeze()  # otherwise the interpreter's end goes through a million objects of torch, which takes seconds
    sys.exit(status)
