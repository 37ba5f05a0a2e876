"""Coverage-guided fuzzing of records, headers, gateway requests, and the Parquet files and note of an archive.

    pip install atheris && make fuzz RUNS=1000000

Each input must be read, or refused with the error that its reader declares. Anything else, a hang or growing memory ends the run with
status 1 and saves the input to a file, which `python -m benchmarks fuzz FILE` repeats. The seeds are made from one genuine record of each
kind. Prints the resident memory every 50,000 inputs. `TARGETS=archive,note` selects targets; options are libFuzzer's.
"""

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

INSTRUMENTED = ["penstock.topics", "penstock.pipeline.archive", "penstock.pipeline.agents.gateway", "penstock.infra.sandbox.parquet"]
LIMITS = ["-timeout=10", "-rss_limit_mb=2048", "-max_len=16384", "-print_final_stats=1", "-verbosity=1"]


def main(arguments: Sequence[str]) -> int:
    """Fuzz until libFuzzer's `-runs` are done."""
    if {"-h", "--help"} & set(arguments):
        print(__doc__)
        return 0
    try:
        import atheris
    except ImportError:
        print("benchmarks: fuzz needs the package atheris: pip install atheris", file=sys.stderr)
        return 2
    with atheris.instrument_imports(include=INSTRUMENTED):
        from benchmarks.support import fuzz_targets
    with tempfile.TemporaryDirectory() as folder:
        for number, seed in enumerate(fuzz_targets.seeds()):
            (Path(folder) / f"{number:02d}").write_bytes(seed)
        corpus = [] if any(not word.startswith("-") for word in arguments) else [folder]
        atheris.Setup([sys.argv[0], *LIMITS, *arguments, *corpus], fuzz_targets.one_input)
        atheris.Fuzz()
    return 0
