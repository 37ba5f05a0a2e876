"""`penstock replay`: repeats a stage of a run from its log. The rule: the run's own topics are only read."""

import typer

from penstock.pipeline.cli.replay.rollout import rollout
from penstock.pipeline.cli.replay.score import score
from penstock.pipeline.cli.replay.train import train

app = typer.Typer(help="Do a stage of a run again, from its log: unchanged, to see that it is the same, or changed, to see what if.")
app.command()(rollout)
app.command()(score)
app.command()(train)
