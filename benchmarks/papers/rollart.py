"""RollArt's environments of uneven latency (arXiv 2512.22560): trajectory-level rollout and redundancy.

Both arrangements have the same latencies, sampled for each trajectory and turn from the seed.
`--measure` switches one rule off at a time on the running system, with environments, rewards, an engine and a backend that take time.
`--write` writes docs/explanation/papers.md. `benchmarks environments` measures latencies and redundancy.
"""

from collections.abc import Sequence

from benchmarks.papers.simulated import rollart as simulated
from benchmarks.support.command import with_numbers
from benchmarks.support.comparison import comparison_parser, show


def main(arguments: Sequence[str]) -> None:
    """Print the comparison; with `--measure`, that of the running system."""
    parser = comparison_parser(__name__, __doc__)
    with_numbers(parser, speed_up=40.0, at_once=4)
    parser.add_argument("--variants", nargs="+")
    chosen = parser.parse_args(arguments)
    if not chosen.measure:
        show(simulated.reproduce, as_json=chosen.json)
        return
    from benchmarks.support.timed import rollart as measured  # which imports the workers of a run

    chosen.variants = chosen.variants or list(measured.VARIANTS)
    if unknown := set(chosen.variants) - set(measured.VARIANTS):
        parser.error(f"unknown variants {sorted(unknown)}: choose from {list(measured.VARIANTS)}")
    measured.main(chosen)
