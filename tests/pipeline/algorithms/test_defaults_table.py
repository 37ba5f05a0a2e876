"""The table in docs/explanation/algorithms.md of what an empty `[algorithm]` comes to, for every loss, schedule and number format.

`make format` rewrites it.
"""

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from docs.generate import table
from penstock.pipeline.algorithms.registry import LOSSES
from penstock.pipeline.config.load import from_table
from penstock.pipeline.config.run_config import Config
from penstock.pipeline.scheduling.rules import MODES

DOCS = Path(__file__).resolve().parents[3] / "docs" / "explanation" / "algorithms.md"
BEGIN, END = "<!-- defaults -->\n", "<!-- /defaults -->"
DTYPES = ("float32", "bfloat16")
HEAD = ("`loss`", "`mode`", "S", "float32 on both sides", "bfloat16 on either side")


def config_of(loss: str, mode: str, per_version: int, engine: str, trainer: str) -> Config:
    return from_table({
        "run": {"steps": 1}, "model": {"path": "/m"}, "data": {"source": "/d.jsonl"}, "algorithm": {"loss": loss},
        "schedule": {"mode": mode, "steps_per_version": per_version}, "rollout": {"engine": "vllm", "dtype": engine},
        "trainer": {"dtype": trainer},
    })  # fmt: skip


def resolved(config: Config) -> str:
    return f"`{config.proximal}`" + ("" if config.correction == "none" else f" + `{config.correction}`")


def rows() -> Iterator[tuple[str, str, str, str, str]]:
    """Loss, mode, S, and what they come to in float32 and in bfloat16."""
    for loss, mode, per_version in product(LOSSES, MODES, (1, 2)):
        exact, *rounded = (resolved(config_of(loss, mode, per_version, *dtypes)) for dtypes in product(DTYPES, DTYPES))
        assert len(set(rounded)) == 1, "it matters which side is rounded"
        yield loss, mode, "1" if per_version == 1 else "> 1", exact, rounded[0]


def merged() -> list[list[str]]:
    """The rows, those of losses and of modes that come to the same in one line."""
    by_modes: dict[tuple[Any, ...], list[str]] = {}
    for loss, mode, *rest in rows():
        by_modes.setdefault((loss, *rest), []).append(mode)
    by_losses: dict[tuple[Any, ...], list[str]] = {}
    for (loss, *rest), modes in by_modes.items():
        by_losses.setdefault((tuple(modes), *rest), []).append(loss)
    return [[_names(losses), _names(modes), *rest] for (modes, *rest), losses in by_losses.items()]


def _names(names: Any) -> str:
    return ", ".join(f"`{name}`" for name in names)


def test_the_table_of_defaults_in_the_docs_is_what_the_code_resolves() -> None:
    written = DOCS.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    assert written == table(HEAD, *merged()), "rewrite it with: make format"


if __name__ == "__main__":
    before, _, rest = DOCS.read_text(encoding="utf-8").partition(BEGIN)
    DOCS.write_text(before + BEGIN + table(HEAD, *merged()) + END + rest.partition(END)[2], encoding="utf-8")
