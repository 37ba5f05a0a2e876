"""Every row is read before a run: what a later row lacks is named with its line, and rewards are tried on each kind of row."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.infra.errors import ConfigError
from penstock.pipeline.config.load import from_table
from penstock.pipeline.data.read_files import DataError, Fields, make_row
from penstock.pipeline.data.run_data import open_data, open_eval_data
from penstock.pipeline.data.tokenization import Renderer, digests
from penstock.pipeline.launch.check import rows
from penstock.pipeline.launch.check.rows import RowReader, endless_warning
from penstock.pipeline.runtime.reporting import log_lines
from tests.support.light_model import light_model

GRADED = "def graded(completions, answer, level):\n    return [1.0] * len(completions)\n"
OPEN = "def free(completions, **columns):\n    return [1.0] * len(completions)\n"

Read = Callable[..., tuple[RowReader, list[str]]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return light_model(tmp_path_factory.mktemp("rows") / "model", context=512)


@pytest.fixture
def read(tmp_path: Path, model: Path) -> Read:
    """Write rows, read them as a run's training data, and return the reader with what it said."""
    (tmp_path / "rew.py").write_text(GRADED + OPEN)

    def reading(
        *files: list[Any], reward: str = "exact_match", also: str | None = None, **sections: Mapping[str, Any]
    ) -> tuple[RowReader, list[str]]:
        for number, written in enumerate(files):
            (tmp_path / f"rows{number or ''}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in written))
        sources = [str(tmp_path / f"rows{number or ''}.jsonl") for number in range(len(files))] or [str(tmp_path / "rows.parquet")]
        function = f"{tmp_path}/{reward}" if ":" in reward else reward
        table: dict[str, Any] = {
            "run": {"steps": 1}, "model": {"path": str(model)}, "reward": {"functions": [function, *([also] if also else [])]},
            **sections, "data": {"source": sources if len(sources) > 1 else sources[0], **sections.get("data", {})},
        }  # fmt: skip
        config, said = from_table(table), list[str]()
        reader = RowReader(config, notify=said.append)
        reader.read(open_data(config))
        reader.read_held_out(open_eval_data(config))
        return reader, said

    return reading


GOOD = {"prompt": "p", "answer": "a", "level": 1}


@pytest.mark.parametrize(
    ("later", "reward", "words"),
    [
        ({"prompt": "p", "answer": "a", "levle": 2}, "rew.py:graded", "needs the column 'level', .*did you mean 'levle'"),
        ({"prompt": "p", "level": 1}, "exact_match", r'needs the column .answer., .*or to "" if no reward function needs answers'),
        ({"prompt": "p", "answer": None}, "exact_match", r"the answer \(column 'answer'\) is null, which the reward exact_match cannot"),
        ({"prompt": "p", "answer": ""}, "math_verify", "is empty text, which the reward math_verify cannot compare: expected text, a"),
        ({"prompt": "p", "answer": {"style": "rule"}}, "exact_match", "is a dict with the keys style, which"),
        ({"prompt": "p", "answer": float("nan")}, "exact_match", "is null, which"),
        ({"prompt": "p", "answer": float("inf")}, "exact_match", "that column contains an infinite number, which JSON cannot represent"),
        ({"prompt": "p", "answer": False}, "exact_match", "is the boolean false, which"),
    ],
)
def test_a_later_row_that_a_reward_cannot_judge_is_named(read: Read, later: dict[str, Any], reward: str, words: str) -> None:
    with pytest.raises(DataError, match=rf"rows.jsonl:3: .*{words}"):
        read([GOOD, GOOD, later, GOOD], reward=reward)


def test_held_out_rows_are_read_by_the_same_rules(read: Read, tmp_path: Path) -> None:
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (GOOD, {"prompt": "p", "answer": None})))
    with pytest.raises(DataError, match=r"test.jsonl:2: the answer .* is null"):
        read([GOOD], eval={"source": str(tmp_path / "test.jsonl")})


def test_a_source_that_cannot_be_opened_is_named_with_its_key_and_one_that_is_missing_is_a_mistake_in_the_configuration(read: Read) -> None:
    with pytest.raises(ConfigError, match=r"^eval.source: there is no file"):
        read([GOOD], eval={"source": "absent.jsonl"})
    with pytest.raises(DataError, match=r"^data.source: .*: there is no row 3"):
        read([GOOD], data={"start": 3})


def test_data_without_answers_are_right_for_rewards_that_need_none(read: Read) -> None:
    rows_without = [{"prompt": "p"}, {"prompt": "q"}]
    assert read(rows_without, reward="soft_overlong")[1] == []
    assert read(rows_without, reward="rew.py:free")[1] == []
    assert read(rows_without, reward="rew.py:free", data={"answer_field": ""})[1] == []
    with pytest.raises(DataError, match=r"rows.jsonl:1: [^|]*'answer', [^|]* \(all 2 rows\)$"):
        read(rows_without)


def test_null_and_empty_answers_are_right_where_no_built_in_reward_judges_them(read: Read) -> None:
    assert read([{"prompt": "p", "answer": None}, {"prompt": "p", "answer": ""}], reward="rew.py:free")[1] == []
    chosen = {"rewards": {"rows1": ["soft_overlong"]}}
    assert read([GOOD], [{"prompt": "p", "answer": None}], also="soft_overlong", data=chosen)[1] == []
    assert read([{"prompt": "p", "answer": {"ground_truth": [1, "one"]}}])[1] == []


def test_rewards_are_tried_on_the_first_rows_and_on_one_of_each_kind(read: Read) -> None:
    other = [{**GOOD, "level": None}, {**GOOD, "level": 2}, {"prompt": "p", "answer": GOOD["answer"]}, {**GOOD, "level": None}]
    reader, _ = read([GOOD, GOOD, GOOD, *other, *[{**GOOD, f"column{n}": 1} for n in range(20)]], reward="rew.py:free")
    assert [row.origin.rpartition(":")[2] for row in reader.kinds] == ["1", "2", "4", "6", "8", "9", "10", "11", "12", "13"]
    assert len(reader.kinds) == rows.PER_SOURCE + rows.MOST_KINDS


@pytest.mark.parametrize("same", [1, 2, 5, 40])
def test_rewards_are_tried_on_two_rows_whose_answers_differ_wherever_these_are(read: Read, same: int) -> None:
    many = [*[{"prompt": "p", "answer": "yes"}] * same, {"prompt": "q", "answer": "no"}, {"prompt": "r", "answer": "no"}]
    reader, _ = read(many, reward="rew.py:free")
    assert {row.columns["answer"] for row in (*reader.kinds, *reader.spread)} == {"yes", "no"}
    assert len({row.origin for row in (*reader.kinds, *reader.spread)}) == len(reader.kinds) + len(reader.spread)


def test_columns_that_no_reward_gets_or_that_have_a_name_of_the_run_are_told_once(read: Read, tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": ["p", "q"], "answer": ["a", "b"], "image": [b"x", b"y"]}), tmp_path / "rows.parquet")
    _, said = read()
    assert said == [
        f"{tmp_path}/rows.parquet:1: the column 'image' contains bytes, which JSON cannot represent: no reward function gets it"
    ]
    _, said = read([{**GOOD, "completion_ids": "old"}] * 2)
    assert [line.partition("rows.jsonl:")[2] for line in said] == [
        "1: the run has a value of its own for 'completion_ids': functions find the column in columns[i]['completion_ids']"
    ]


@pytest.mark.parametrize(
    ("ending", "tag"),
    [("<think>\n", "<think>"), ("<answer>", "<answer>"), ("<s>", None), ("<think>\n\n</think>\n\n", None), ("", None)],
)
def test_a_tag_that_the_template_opens_is_told_once_because_rewards_do_not_get_it(
    read: Read, tmp_path: Path, ending: str, tag: str | None
) -> None:
    (tmp_path / "t.jinja").write_text(ENDS + f"{{% if add_generation_prompt %}}{ending}{{% endif %}}")
    _, said = read([GOOD, GOOD], data={"chat_template": str(tmp_path / "t.jinja")})
    notes = [line for line in said if "completions start after it" in line]
    where = f"{tmp_path}/rows.jsonl:1: the prompt ends with {tag}: completions start after it; reward functions do not get it"
    assert notes == ([where] if tag else [])


def test_a_mixture_accepts_the_column_data_source_and_keeps_its_own_name_for_the_source(read: Read) -> None:
    reader, said = read([{**GOOD, "data_source": "openai/gsm8k"}], [GOOD])
    assert [row.columns.get("data_source") for row in reader.kinds] == ["rows", "rows1"]
    assert [row.columns.get("columns") for row in reader.kinds] == [{"data_source": "openai/gsm8k"}, None]
    assert ["'data_source'" in line for line in said] == [True]
    reader, said = read([{**GOOD, "data_source": ["openai/gsm8k"]}])
    assert reader.kinds[0].columns["data_source"] == ["openai/gsm8k"]
    assert said == []


def test_long_data_are_read_with_their_progress(read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_lines, "PROGRESS_EVERY_S", 0.0)
    assert read([GOOD] * 3)[1] == [f"checked {number} of 3 rows" for number in (1, 2, 3)]


ENDS = "{% for m in messages %}{{ m.content }}</s>{% endfor %}"
UNENDED = "{% for m in messages %}<s>{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "eos", "stop", "words"),
    [
        (None, True, [], None),
        (ENDS, True, [], None),
        (UNENDED, True, [], "the chat template writes none of the model's end tokens (ids 257) after a completion"),
        (UNENDED, True, ["\n"], None),
        (ENDS, False, [], "config.json, generation_config.json and the tokenizer name no eos token"),
        (None, False, [], 'truncated at sampling.max_new_tokens = 8, and with algorithm.truncated = "mask" none is trained'),
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


def test_replaced_characters_are_counted_and_named_with_their_rows(read: Read) -> None:
    row = make_row({"prompt": "a\ud83d", "answer": ["\ude00", {"\ud83d": 1}]}, index=0, origin="rows.jsonl:1", fields=Fields())
    assert (row.prompt, row.columns["answer"]) == ("a\ufffd", ["\ufffd", {"\ufffd": 1}])
    assert read([GOOD], reward="rew.py:free")[0].replaced_warning() is None
    warning = read([{"prompt": "a\ud83d", "answer": "\ude00"}] * 5, reward="rew.py:free")[0].replaced_warning() or ""
    assert re.match(r"\S*rows.jsonl:1, \S*rows.jsonl:2, \S*rows.jsonl:3 and 2 more rows: 10 lone surrogates ", warning)
