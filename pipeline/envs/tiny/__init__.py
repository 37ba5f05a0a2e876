"""Tiny models and tasks that can be learned on one CPU core in a minute; made from a seed, without downloads.

`successor_rows` needs no torch; `penstock.pipeline.envs.tiny.model.make_tiny_model` does.
"""

from penstock.pipeline.envs.tiny.lake import lake_rows
from penstock.pipeline.envs.tiny.task import successor_rows

__all__ = ["lake_rows", "successor_rows"]
