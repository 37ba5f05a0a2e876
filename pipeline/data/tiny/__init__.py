"""Tiny models and tasks that can be learned on one CPU core in a minute; made from a seed, without downloads.

`successor_rows` needs no torch; `penstock.pipeline.data.tiny.model.make_tiny_model` does.
"""

from penstock.pipeline.data.tiny.lake import lake_rows
from penstock.pipeline.data.tiny.task import successor_rows

__all__ = ["lake_rows", "successor_rows"]
