"""A model and a task small enough to learn on one CPU core in a minute; the rule: everything in it is made from a seed, nothing is downloaded.

`successor_rows` needs no torch; `make_tiny_model` imports it when called.
"""

from pipeline.tiny.task import successor_rows

__all__ = ["successor_rows"]
