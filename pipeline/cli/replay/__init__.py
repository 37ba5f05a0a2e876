"""`penstock replay`: repeats a stage of a run from its log. The run's topics are only read."""

import typer

from penstock.pipeline.cli.replay.rollout import rollout
from penstock.pipeline.cli.replay.score import score
from penstock.pipeline.cli.replay.train import train

app = typer.Typer(help="Repeat a stage of a run from its log: unchanged, to verify it, or with a change.")
app.command()(rollout)
app.command()(score)
app.command()(train)
