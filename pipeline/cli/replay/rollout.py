"""`penstock replay rollout`: generates recorded samples again and compares them. The run's topics are only read."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.pipeline.cli.options import Bootstrap, Json, RunOrFolder, Security, TrustRun, emit, notify, reading

if TYPE_CHECKING:
    from penstock.pipeline.replay.resample import ResampledCompletion

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
        int | None,
        typer.Option("--policy-version", min=0, help="Policy version to generate with; each sample's first one if absent."),
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="A.B=C", help="Change rollout.*, sampling.* or run.seed; repeatable.")
    ] = None,
    trust_code: TrustRun = False,
    bootstrap: Bootstrap = "embedded",
    security: Security = None,
    json: Json = False,
) -> None:
    """Generate recorded samples again with their weights and seeds, and compare them token by token."""
    from penstock.pipeline.replay.resample import ResampleRequest, resample, summary
    from penstock.pipeline.runtime.registration.trust import Trust

    with reading(run, bootstrap, security, executes=True) as (log, run_id):
        request = ResampleRequest(step=step, group=group, version=version, overrides=overrides or [], trust=Trust(code=trust_code))
        samples = sorted(resample(log, run_id, request, notify=notify), key=lambda sample: (sample.group, sample.sample))
    figures = summary(samples)
    differing = [sample for sample in samples if not sample.same]
    if json:
        emit({**figures, "differences": differing})
        return
    print(f"{figures['same_samples']} of {figures['samples']} samples are the same, token by token")
    print(f"{figures['tokens_before_a_difference']} of {figures['tokens']} tokens are before the first difference of their sample", end="")
    print(f"; their logprobs differ by at most {figures['logprob_difference_max']:.2g}")
    if several := figures["samples_of_several_versions"]:
        print(f"{several} samples have tokens of several versions: compared up to the first change of version")
    for sample in differing[:SHOWN]:
        print(_line(sample))
    if len(differing) > SHOWN:
        print(f"… and {len(differing) - SHOWN} more; --json has all")


def _line(sample: "ResampledCompletion") -> str:
    assert sample.first_difference is not None
    index = sample.first_difference
    low, high = max(0, index - CONTEXT), index + CONTEXT + 1
    return (
        f"group {sample.group} sample {sample.sample} version {sample.version}: token {index} of {sample.comparable}\n"
        f"  recorded {_ids(sample.recorded, low, index, high)}\n  again    {_ids(sample.drawn, low, index, high)}"
    )


def _ids(tokens: Sequence[int], low: int, index: int, high: int) -> str:
    words = [f"[{token}]" if number == index else str(token) for number, token in enumerate(tokens[low:high], low)]
    return " ".join([*(["…"] if low else []), *words, "…" if high < len(tokens) else "(end)"])
