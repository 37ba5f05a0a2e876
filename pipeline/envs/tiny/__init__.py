"""A model and a task small enough to learn on one CPU core in a minute. The rule: everything is made from a seed, nothing is downloaded.

`successor_rows` needs no torch; `penstock.pipeline.envs.tiny.model.make_tiny_model` does.
"""

from penstock.pipeline.envs.tiny.lake import lake_rows
from penstock.pipeline.envs.tiny.task import successor_rows

__all__ = ["lake_rows", "successor_rows"]
