"""Warnings about texts before a run starts."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.pipeline.data.rows import Fields, make_row
from penstock.pipeline.data.tokenization import Renderer, digests
from penstock.pipeline.launch.check.rows import ReplacedText, endless_warning
from tests.support.light_model import light_model

ENDS = "{% for m in messages %}{{ m.content }}</s>{% endfor %}"
OPEN = "{% for m in messages %}<s>{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "eos", "stop", "words"),
    [
        (None, True, [], None),
        (ENDS, True, [], None),
        (OPEN, True, [], "the chat template writes none of the model's end tokens (ids 257) after a completion"),
        (OPEN, True, ["\n"], None),
        (ENDS, False, [], "config.json, generation_config.json and the tokenizer name no eos token"),
        (None, False, [], 'cut at sampling.max_new_tokens = 8, and with algorithm.truncated = "mask" none is trained'),
        (None, False, ["\n"], None),
    ],
)
def test_what_nothing_ends_is_a_warning(tmp_path: Path, template: str | None, eos: bool, stop: list[str], words: str | None) -> None:
    folder = light_model(tmp_path / "m", template=template)
    if not eos:
        (folder / "config.json").write_text("{}")
        (folder / "tokenizer_config.json").write_text("{}")
    config: Any = SimpleNamespace(sampling=SimpleNamespace(stop=stop, max_new_tokens=8), algorithm=SimpleNamespace(truncated="mask"))
    warning = endless_warning(config, digests(folder)["stop_ids"], Renderer(folder))
    assert warning is None if words is None else words in (warning or "")


def test_replaced_characters_are_counted_and_named_with_their_rows() -> None:
    replaced = ReplacedText()
    assert replaced.warning() is None
    for number in range(5):
        text = {"prompt": "a\ud83d", "answer": ["\ude00", {"\ud83d": 1}]}
        row = replaced.seen(make_row(text, index=number, origin=f"rows.jsonl:{number + 1}", fields=Fields()))
        assert (row.prompt, row.columns["answer"]) == ("a\ufffd", ["\ufffd", {"\ufffd": 1}])
    assert (replaced.warning() or "").startswith("rows.jsonl:1, rows.jsonl:2, rows.jsonl:3 and 2 more rows: 15 lone surrogates ")
