"""`python -m penstock.workers ROLE --run RUN --bootstrap HOST:PORT`: one worker process.

The rule: arguments are parsed before a role's heavy half is imported.
"""

import sys

from penstock.pipeline.runtime.main import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
