"""`penstock replay rollout`: recorded prompts drawn again. The rule: nothing is written to the run's topics."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.pipeline.cli.options import Bootstrap, Json, RunOrFolder, Security, TrustRun, emit, notify, reading

if TYPE_CHECKING:
    from penstock.pipeline.replay.resample.compare import ResampledCompletion

SHOWN = 20
"""Number of differing samples listed; `--json` has all of them."""
CONTEXT = 4
"""Tokens shown on either side of a difference."""


def rollout(
    run: RunOrFolder,
    *,
    step: Annotated[int | None, typer.Option("--step", min=0, help="All groups of this step's plan.")] = None,
    group: Annotated[int | None, typer.Option("--group", min=0, help="This one group.")] = None,
    version: Annotated[
        int | None, typer.Option("--policy-version", min=0, help="Weights to draw under; those each sample began under if absent.")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="A.B=C", help="Draw otherwise: rollout.*, sampling.*, run.seed; repeatable.")
    ] = None,
    trust_code: TrustRun = False,
    bootstrap: Bootstrap = "embedded",
    security: Security = None,
    json: Json = False,
) -> None:
    """Draw recorded prompts again with the recorded weights and seeds, and say token by token where they differ."""
    from penstock.pipeline.replay.resample.compare import summary
    from penstock.pipeline.replay.resample.draw import ResampleRequest, redraw
    from penstock.pipeline.runtime.registration.trust import Trust

    with reading(run, bootstrap, security, executes=True) as (log, run_id):
        request = ResampleRequest(step=step, group=group, version=version, overrides=overrides or [], trust=Trust(code=trust_code))
        found = sorted(redraw(log, run_id, request, notify=notify), key=lambda one: (one.group, one.sample))
    figures = summary(found)
    if json:
        emit({**figures, "differences": [one for one in found if not one.same]})
        return
    print(f"{figures['same_samples']} of {figures['samples']} samples are the same, token by token")
    print(f"{figures['tokens_before_a_difference']} of {figures['tokens']} tokens stand before a difference", end="")
    print(f"; their logprobs differ by at most {figures['logprob_difference_max']:.2g}")
    if several := figures["samples_of_several_versions"]:
        print(f"{several} samples were drawn under several versions: compared up to their first change of weights")
    differing = [one for one in found if not one.same]
    for one in differing[:SHOWN]:
        print(_line(one))
    if len(differing) > SHOWN:
        print(f"… and {len(differing) - SHOWN} more; --json has all")


def _line(sample: "ResampledCompletion") -> str:
    assert sample.first_difference is not None
    at = sample.first_difference
    low, high = max(0, at - CONTEXT), at + CONTEXT + 1
    return (
        f"group {sample.group} sample {sample.sample} version {sample.version}: token {at} of {sample.comparable}\n"
        f"  recorded {_ids(sample.recorded, low, at, high)}\n  drawn    {_ids(sample.drawn, low, at, high)}"
    )


def _ids(tokens: Sequence[int], low: int, at: int, high: int) -> str:
    words = [f"[{token}]" if number == at else str(token) for number, token in enumerate(tokens[low:high], low)]
    return " ".join([*(["…"] if low else []), *words, "…" if high < len(tokens) else "(end)"])
