"""PipelineRL's case study (arXiv 2509.19128): in-flight updates against rollout and training in turns, on 128 accelerators.

The paper's formulas are pure functions; the simulator runs the split that they give, under the scheduling rules of a run.
`--measure` runs both on the system, with an engine and a backend that take the paper's time, on a quarter of the machines: the ratio of
rates depends on the samples for each accelerator only, g_max·B/N. An optimizer step lasts `--step-s` seconds. `--write` writes
docs/explanation/papers.md.
"""

from collections.abc import Sequence

from benchmarks.papers.simulated import pipelinerl as simulated
from benchmarks.support.command import with_numbers
from benchmarks.support.comparison import comparison_parser, show


def main(arguments: Sequence[str]) -> None:
    """Print the comparison; with `--measure`, that of the running system."""
    parser = comparison_parser(__name__, __doc__)
    with_numbers(parser, step_s=1.5)
    chosen = parser.parse_args(arguments)
    if not chosen.measure:
        show(simulated.reproduce, as_json=chosen.json)
        return
    from benchmarks.support.timed import pipelinerl as measured  # which imports the workers of a run

    measured.main(chosen)
