"""The shortest configuration there is, for tests to which most of it does not matter."""

from collections.abc import Mapping
from typing import Any

from penstock.pipeline.config.load import Config, from_table

LEAST: dict[str, Any] = {"run": {"steps": 1}, "model": {"path": "/m"}, "data": {"source": "tiny:successor"}}


def merged(table: Mapping[str, Mapping[str, Any]], sections: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """A table of sections with more of them, and more keys in those it has."""
    return {name: {**table.get(name, {}), **sections.get(name, {})} for name in [*table, *(sections.keys() - table.keys())]}


def least_config(**sections: Mapping[str, Any]) -> Config:
    """Whatever has no default, and these sections; keys of `LEAST` stay unless they are named."""
    return from_table(merged(LEAST, sections))
