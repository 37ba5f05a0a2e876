"""`python -m penstock.workers ROLE --run RUN --bootstrap HOST:PORT`: one worker process.

The rule: arguments are parsed before a role's heavy half is imported.
"""

import gc
import sys

from penstock.pipeline.runtime.main import main

if __name__ == "__main__":
    status = main(sys.argv[1:])
    gc.freeze()  # otherwise the interpreter's end goes through a million objects of torch, which takes seconds
    sys.exit(status)
