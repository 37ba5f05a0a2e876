"""RolloutPipe's settings (arXiv 2606.26997): pipelined against synchronous, R = 32, 64 and 96 groups a round.

Each workload is calibrated on its round of 96 groups; the rounds of 32 and 64 groups are predicted from that.
`--measure` runs them on the system: broker, feeder, rollout workers, scorer and trainer as in every run, with an engine and a backend
that take the paper's time, `--speed-up` times faster. A simulated round has the same samples. `--write` writes docs/explanation/papers.md.
`--keep FILE` adds the measured rounds to a file, and measures only those that it has not.
"""

from collections.abc import Sequence
from pathlib import Path

from benchmarks.papers.simulated import rolloutpipe as simulated
from benchmarks.support.command import with_numbers
from benchmarks.support.comparison import comparison_parser, show


def main(arguments: Sequence[str]) -> None:
    """Print the comparison; with `--measure`, that of the running system."""
    parser = comparison_parser(__name__, __doc__)
    with_numbers(parser, speed_up=10.0, at_once=12)
    workloads = [each.name for each in simulated.PUBLISHED]
    parser.add_argument("--workloads", nargs="+", choices=workloads, default=workloads)
    parser.add_argument("--groups", nargs="+", type=int, choices=simulated.ROUNDS, default=simulated.ROUNDS)
    parser.add_argument("--keep", type=Path, metavar="FILE")
    chosen = parser.parse_args(arguments)
    if not chosen.measure:
        show(simulated.reproduce, as_json=chosen.json)
        return
    from benchmarks.support.timed import rolloutpipe as measured  # which imports the workers of a run

    measured.main(chosen)
