"""Data sets: every source gives the same kind of row, every damaged row is named with its place, and the order is a pure function."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.pipeline.data.open import Rows, check, open_dataset
from penstock.pipeline.data.read_files import DataError, Dataset, Fields, Row
from penstock.pipeline.data.run_data import order
from tests.support.paths import EXAMPLES, GSM8K


def lines(folder: Path, rows: list[Any], name: str = "rows.jsonl") -> Path:
    file = folder / name
    file.write_bytes(b"".join((row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n" for row in rows))
    return file


@given(seed=st.integers(0, 2**70), size=st.integers(1, 300), epoch=st.integers(0, 5))
def test_each_epoch_visits_every_row_once(seed: int, size: int, epoch: int) -> None:
    drawn = [order(seed, epoch * size + place, size) for place in range(size)]
    assert {at for at, _ in drawn} == {epoch}
    assert sorted(row for _, row in drawn) == list(range(size))


@given(seed=st.integers(0, 2**32), size=st.integers(1, 200), groups=st.lists(st.integers(0, 2000), min_size=1, max_size=20))
def test_a_groups_row_depends_on_nothing_that_was_asked_before(seed: int, size: int, groups: list[int]) -> None:
    forwards = [order(seed, n, size) for n in groups]
    assert forwards == [order(seed, n, size) for n in reversed(groups)][::-1]


def test_the_shuffle_is_the_same_on_every_machine_and_can_be_off() -> None:
    assert [order(7, n, 5)[1] for n in range(10)] == [4, 1, 3, 2, 0, 3, 1, 2, 4, 0]
    assert [order(7, n, 3, shuffle=False) for n in range(4)] == [(0, 0), (0, 1), (0, 2), (1, 0)]
    assert [order(1, n, 50)[1] for n in range(50)] != [order(2, n, 50)[1] for n in range(50)]


def test_jsonl_rows_have_prompt_answer_and_other_columns(tmp_path: Path) -> None:
    file = lines(tmp_path, [{"q": "1+1", "solution": 2, "level": "easy"}, b"", {"q": "2+2", "solution": 4, "level": None}])
    data = open_dataset("rows.jsonl", prompt_field="q", answer_field="solution", base_dir=tmp_path)
    assert len(data) == 2
    assert data[0] == Row(index=0, prompt="1+1", messages=None, columns={"solution": 2, "level": "easy", "answer": 2}, origin=f"{file}:1")
    assert data[1].origin == f"{file}:3"  # the file's own line number
    check(data)


def test_messages_become_a_conversational_prompt(tmp_path: Path) -> None:
    talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]
    lines(tmp_path, [{"prompt": talk, "answer": "2"}])
    row = open_dataset("rows.jsonl", base_dir=tmp_path)[0]
    assert row.prompt is None
    assert row.messages == talk


def test_a_folder_and_a_glob_are_read_in_the_order_of_names(tmp_path: Path) -> None:
    lines(tmp_path, [{"prompt": "c", "answer": 3}], "b.jsonl")
    lines(tmp_path, [{"prompt": "a", "answer": 1}, {"prompt": "b", "answer": 2}], "a.jsonl")
    for source in (str(tmp_path), str(tmp_path / "*.jsonl")):
        data = open_dataset(source)
        assert [row.prompt for row in data] == ["a", "b", "c"]
        assert data[2].origin.endswith("b.jsonl:1")


def test_start_and_limit_choose_a_window_with_its_own_numbers(tmp_path: Path) -> None:
    lines(tmp_path, [{"prompt": f"p{n}", "answer": n} for n in range(10)])
    data = open_dataset("rows.jsonl", base_dir=tmp_path, start=3, limit=4)
    assert [(row.index, row.prompt) for row in data] == [(0, "p3"), (1, "p4"), (2, "p5"), (3, "p6")]
    assert len(open_dataset("rows.jsonl", base_dir=tmp_path, start=8, limit=4)) == 2
    with pytest.raises(IndexError):
        data[4]
    lines(tmp_path, [], "none.jsonl")
    with pytest.raises(DataError, match=r"none\.jsonl is empty"):
        open_dataset("none.jsonl", base_dir=tmp_path)
    with pytest.raises(DataError, match=r"there is no row 10, only 10 rows"):
        open_dataset("rows.jsonl", base_dir=tmp_path, start=10)


@pytest.mark.parametrize(
    ("damaged", "words"),
    [
        (b'{"prompt": "x", "answer": ', "not valid JSON"),
        (b'["prompt", "answer"]', "expected a JSON object, got a list"),
        ({"promt": "x", "answer": 1}, "no field 'prompt' (data.prompt_field); did you mean 'promt'?"),
        ({"prompt": "  ", "answer": 1}, "the prompt (field 'prompt') is empty"),
        ({"prompt": [], "answer": 1}, "is empty"),
        ({"prompt": 7, "answer": 1}, "is 7; expected text or a list of messages"),
        ({"prompt": None, "answer": 1}, "is null; expected text"),
        ({"prompt": [{"role": "user"}], "answer": 1}, "message 1: 'content' is neither a string nor"),
        (b'{"prompt": "\xff\xfe", "answer": 1}', "not UTF-8 at byte 12 of the line"),
        (b'{"prompt": "x", "answer": "a", "answer": "b"}', "the key 'answer' occurs twice"),
        (b'{"prompt": "x", "tests": {"in": 1, "in": 2}}', "the key 'in' occurs twice"),
        pytest.param(b'{"prompt": "x", "answer": ' + b"7" * 5000 + b"}", "a number of more than 4,300 digits", id="digits"),
        (b'{"prompt": "x", "answer": "a\tb"}', "not valid JSON: invalid control character at character 29"),
        (b'{"prompt": "x", "answer": "a}', "not valid JSON: unterminated string at character 27"),
        (b'{"prompt": "x"}{"prompt": "y"}', "not valid JSON: extra data at character 16"),
        pytest.param(b"[" * 100_000, "not valid JSON: nested too deeply", id="nested"),
    ],
)
def test_a_row_that_cannot_be_read_is_named_with_file_and_line(tmp_path: Path, damaged: Any, words: str) -> None:
    file = lines(tmp_path, [{"prompt": "good", "answer": 1}, b"", damaged, {"prompt": "good", "answer": 2}])
    data = open_dataset("rows.jsonl", base_dir=tmp_path)
    with pytest.raises(DataError) as caught:
        check(data)
    said = str(caught.value)
    assert said.startswith(f"{file}:3: ") and words in said and "\n" not in said
    assert data[0].prompt == data[2].prompt == "good"


@pytest.mark.parametrize(
    "written", ['[\n  {\n    "prompt": "x"\n  }\n]\n', '{\r\n  "prompt": "x"\r\n}\r\n{\r\n  "prompt": "y"\r\n}', "\ufeff\n[\n]"]
)
def test_a_pretty_printed_file_is_refused_with_one_line(tmp_path: Path, written: str) -> None:
    (tmp_path / "rows.jsonl").write_text(written, encoding="utf-8", newline="")
    with pytest.raises(DataError, match=r"rows.jsonl:[12]: a value that continues on the next line; write one JSON object per line$"):
        open_dataset("rows.jsonl", base_dir=tmp_path)


def test_lines_may_end_as_on_windows_and_files_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(b'\xef\xbb\xbf\r\n{"prompt": "a", "answer": "1"}\r\n\r\n{"prompt": "b", "answer": "2"}')
    data = open_dataset("rows.jsonl", base_dir=tmp_path)
    assert [(row.prompt, row.columns, row.origin.rpartition(":")[2]) for row in data] == [
        ("a", {"answer": "1"}, "2"),
        ("b", {"answer": "2"}, "4"),
    ]


def test_a_named_answer_column_that_is_missing_is_refused_and_the_usual_one_need_not_be_there(tmp_path: Path) -> None:
    lines(tmp_path, [{"prompt": "x", "gold": 1}, {"prompt": "y"}])
    with pytest.raises(
        DataError, match=r'rows.jsonl:2: no field .gold. .data.answer_field. .the row has: prompt.; set data.answer_field = "" if'
    ):
        check(open_dataset("rows.jsonl", base_dir=tmp_path, answer_field="gold"))
    for name in ("answer", ""):
        assert [row.columns for row in open_dataset("rows.jsonl", base_dir=tmp_path, answer_field=name)] == [{"gold": 1}, {}]


def test_the_column_that_answer_field_names_is_the_answer_and_one_called_answer_is_kept_aside(tmp_path: Path) -> None:
    lines(tmp_path, [{"prompt": "x", "gold": "1", "answer": "long"}])
    row = open_dataset("rows.jsonl", base_dir=tmp_path, answer_field="gold")[0]
    assert row.columns == {"gold": "1", "answer": "1", "columns": {"answer": "long"}}
    assert open_dataset("rows.jsonl", base_dir=tmp_path, answer_field="prompt")[0].columns["answer"] == "x"


def test_the_check_counts_all_damaged_rows_and_asks_the_caller_too(tmp_path: Path) -> None:
    lines(tmp_path, [{"prompt": "good", "answer": 1}, *[{"prompt": ""}] * 6])

    def refuses_good_ones(row: Row) -> None:
        if row.prompt == "good":
            raise ValueError(f"{row.origin}: too good")

    with pytest.raises(DataError, match=r"rows.jsonl:1: too good \| .*:2: the prompt .* is empty \(and 5 more rows\)$"):
        check(open_dataset("rows.jsonl", base_dir=tmp_path), also=refuses_good_ones)


def test_problems_that_are_not_told_are_counted_apart_from_the_rows_of_the_last_one_told(tmp_path: Path) -> None:
    def refuses(row: Row) -> None:
        raise ValueError(f"{row.origin}: {row.prompt}")

    lines(tmp_path, [{"prompt": prompt, "answer": 1} for prompt in "abccde"])
    with pytest.raises(DataError, match=r"rows.jsonl:3: c \(and 1 more row\) \| 2 more rows have other problems$"):
        check(open_dataset("rows.jsonl", base_dir=tmp_path), also=refuses)


@settings(max_examples=30, deadline=None)
@given(bad=st.lists(st.sampled_from(["", None, 7, [], "good"]), min_size=1, max_size=12))
def test_each_problem_of_the_rows_is_told_once_with_its_number_of_rows(bad: list[Any]) -> None:
    data = Dataset(Rows([{"prompt": prompt} for prompt in bad], name="r", digest=""), fields=Fields())
    try:
        check(data)
        told = ""
    except DataError as error:
        told = str(error)
    parts = told.split(" | ") if told else []
    texts = [re.sub(r" \((all|and) [^()]* rows?\)", "", part).partition(": ")[2] for part in parts]
    counts = [int(number) + 1 for number in re.findall(r"\(and (\d+) more", told)]
    assert len(set(texts)) == len(texts)
    assert sum(counts) + (len(parts) - len(counts)) == sum(prompt != "good" for prompt in bad) or f"(all {len(bad)} rows)" in told


def test_the_digest_follows_the_content_and_not_the_name(tmp_path: Path) -> None:
    first = open_dataset(str(lines(tmp_path, [{"prompt": "a", "answer": 1}], "one.jsonl"))).digest
    assert open_dataset(str(lines(tmp_path, [{"prompt": "a", "answer": 1}], "two.jsonl"))).digest == first
    assert open_dataset(str(lines(tmp_path, [{"prompt": "b", "answer": 1}], "one.jsonl"))).digest != first


def test_parquet_rows_are_read_by_number_over_files_and_row_groups(tmp_path: Path) -> None:
    rows = [{"prompt": f"p{n}", "answer": str(n), "tags": ["x", str(n)], "score": float("nan") if n == 4 else n / 2} for n in range(10)]
    pq.write_table(pa.Table.from_pylist(rows[:6]), tmp_path / "a.parquet", row_group_size=2)
    pq.write_table(pa.Table.from_pylist(rows[6:]), tmp_path / "b.parquet", row_group_size=3)
    data = open_dataset(f"{tmp_path}/*.parquet")
    check(data)
    assert [data[n].prompt for n in (9, 0, 5, 6)] == ["p9", "p0", "p5", "p6"]
    assert data[7].columns == {"answer": "7", "tags": ["x", "7"], "score": 3.5}
    assert data[4].columns["score"] is None
    assert data[7].origin == f"{tmp_path}/b.parquet:2"


def test_a_damaged_parquet_file_a_column_twice_and_one_json_cannot_hold_are_named(tmp_path: Path) -> None:
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 no parquet at all")
    with pytest.raises(DataError, match=r"bad.parquet: not a readable Parquet file"):
        open_dataset(f"{tmp_path}/bad.parquet")
    pq.write_table(pa.table({"prompt": ["x"], "answer": ["1"], "image": [b"\x89PNG"]}), tmp_path / "image.parquet")
    row = open_dataset(f"{tmp_path}/image.parquet")[0]
    assert (row.columns, row.not_json) == ({"answer": "1"}, {"image": "bytes"})
    pq.write_table(pa.Table.from_arrays([pa.array(["x"])] * 3, names=["prompt", "answer", "answer"]), tmp_path / "twice.parquet")
    with pytest.raises(DataError, match=r"twice.parquet: the column 'answer' occurs twice"):
        open_dataset(f"{tmp_path}/twice.parquet")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("row.jsonl", "there is no file .*row.jsonl; did you mean 'rows.jsonl'?"),
        ("table.csv", "expected .jsonl or .parquet"),
        ("empty", "the folder contains no .jsonl or .parquet files"),
        ("tiny:successr", "no such task; did you mean 'successor'?"),
        ("mine.py:rows?depth=3", "has no parameter 'depth'"),
        ("mine.py:breaks", "the function raised ZeroDivisionError"),
    ],
)
def test_a_source_that_is_not_there_is_named_with_the_nearest(tmp_path: Path, source: str, words: str) -> None:
    lines(tmp_path, [{"prompt": "a", "answer": 1}])
    (tmp_path / "table.csv").write_text("prompt,answer\n")
    (tmp_path / "empty").mkdir()
    (tmp_path / "mine.py").write_text("def rows(size=3):\n    return []\ndef breaks():\n    return [1 / 0]\n")
    with pytest.raises(DataError, match=words.replace("?", r"\?")):
        open_dataset(source, base_dir=tmp_path)


def test_the_tiny_task_makes_different_prompts_with_answers() -> None:
    pytest.importorskip("penstock.pipeline.data.tiny")
    data = open_dataset("tiny:successor", size=32, seed=1)
    check(data)
    assert len(data) == len({row.prompt for row in data}) == 32
    assert len({row.columns["answer"] for row in data}) > 16
    held_out = open_dataset("tiny:successor", size=32, seed=1, split="test")
    assert not {row.prompt for row in held_out} & {row.prompt for row in data}


def test_an_own_function_gets_the_seed_and_size_it_names_and_options_of_the_source(tmp_path: Path) -> None:
    text = (
        "def rows(seed, size, *, base=0):\n    for n in range(10**9):\n        yield {'prompt': f'{seed}+{n}', 'answer': base + seed + n}\n"
    )
    (tmp_path / "mine.py").write_text(text)
    data = open_dataset("mine.py:rows?base=100", base_dir=tmp_path, seed=5, size=4)
    assert [(row.prompt, row.columns["answer"]) for row in data] == [("5+0", 105), ("5+1", 106), ("5+2", 107), ("5+3", 108)]
    assert data[1].origin == "mine.py:rows:2"
    (tmp_path / "wrong.py").write_text("def rows():\n    return [{'prompt': 'a', 'answer': 1}, 'b']\n")
    with pytest.raises(DataError, match=r"wrong.py:rows:2: expected a dict, got a str"):
        check(open_dataset("wrong.py:rows", base_dir=tmp_path))


def test_a_hugging_face_folder_is_opened_by_split(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    train = datasets.Dataset.from_list([{"question": f"{n}?", "answer": str(n)} for n in range(5)])
    datasets.DatasetDict({"train": train, "test": train.select([3])}).save_to_disk(str(tmp_path / "saved"))
    data = open_dataset("hf:saved", prompt_field="question", base_dir=tmp_path)
    check(data)
    assert [row.prompt for row in data] == ["0?", "1?", "2?", "3?", "4?"]
    assert [row.prompt for row in open_dataset("hf:saved", prompt_field="question", base_dir=tmp_path, split="test")] == ["3?"]
    with pytest.raises(DataError, match="no split 'tset'; did you mean 'test'"):
        open_dataset("hf:saved", base_dir=tmp_path, split="tset")
    (tmp_path / "plain").mkdir()
    lines(tmp_path / "plain", [{"prompt": "a", "answer": 1}], "train.jsonl")
    loaded = open_dataset(f"hf:plain?cache_dir={tmp_path}/cache", base_dir=tmp_path)
    assert loaded[0].prompt == "a"
    assert loaded[0].origin.startswith("hf:plain[train]")
    sliced = open_dataset(f"hf:plain?cache_dir={tmp_path}/cache", base_dir=tmp_path, split="train[:1]")
    assert len(sliced) == 1


def test_rows_of_hugging_face_are_read_as_they_are_stored_and_no_image_is_decoded(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    text, damaged = datasets.Value("string"), {"bytes": b"no image", "path": None}
    features = {"prompt": text, "answer": datasets.ClassLabel(names=["no", "yes"]), "image": datasets.Image(), "images": [datasets.Image()]}
    features |= {"sound": datasets.Audio(), "grid": datasets.Array2D((1, 2), "float32"), "table": {"a": [text], "b": text}}
    row = {"prompt": "a", "answer": 1, "image": damaged, "images": [damaged], "sound": damaged, "grid": [[1.0, 2.0]]}
    saved = datasets.Dataset.from_list([row | {"table": {"a": ["x"], "b": None}}], features=datasets.Features(features))
    for form in (None, "numpy", "pandas", "arrow"):
        if form is not None:
            saved.set_format(form, columns=["prompt"])
        saved.save_to_disk(str(tmp_path / str(form)))
        made = open_dataset(f"hf:{form}", base_dir=tmp_path)[0]
        assert (made.prompt, made.columns) == ("a", {"answer": 1, "grid": [[1.0, 2.0]], "table": {"a": ["x"], "b": None}})
        assert made.not_json == dict.fromkeys(("image", "images", "sound"), "bytes")


@pytest.fixture(scope="module")
def gym() -> Callable[..., Any]:
    pytest.importorskip("reasoning_gym")
    return open_dataset


@pytest.mark.costly  # the package takes seconds to load
def test_a_reasoning_gym_task_gives_the_same_row_each_time_and_takes_options(gym: Callable[..., Any]) -> None:
    first = gym("reasoning-gym:chain_sum?min_terms=2&max_terms=2", seed=3, size=20)
    again = gym("reasoning-gym:chain_sum?min_terms=2&max_terms=2", seed=3, size=20)
    check(first)
    assert len(first) == 20
    assert first[7] == again[7]
    assert first[7].columns["metadata"]["num_terms"] == 2
    assert first.digest == again.digest != gym("reasoning-gym:chain_sum", seed=4, size=20).digest
    assert json.loads(json.dumps(first[7].columns)) == first[7].columns


@pytest.mark.costly  # the package takes seconds to load
def test_another_split_of_a_reasoning_gym_task_has_other_rows(gym: Callable[..., Any]) -> None:
    options = "reasoning-gym:chain_sum?min_digits=4"
    train, test = gym(options, size=50), gym(options, size=50, split="test")
    assert not {row.prompt for row in train} & {row.prompt for row in test}


def test_an_unknown_task_or_option_is_answered_with_the_nearest(gym: Callable[..., Any]) -> None:
    with pytest.raises(DataError, match="reasoning-gym:chain_sums: no such task; did you mean 'chain_sum'"):
        gym("reasoning-gym:chain_sums")
    with pytest.raises(DataError, match="no option 'max_term'; did you mean 'max_terms'"):
        gym("reasoning-gym:chain_sum?max_term=3")
    with pytest.raises(DataError, match="reasoning-gym:chain_sum does not accept"):
        gym("reasoning-gym:chain_sum?min_terms=9&max_terms=2")


def test_the_example_data_set_is_the_same_for_the_same_seed() -> None:
    source, folder = "own_dataset.py:capitals?longest=8", EXAMPLES
    data = open_dataset(source, base_dir=folder, seed=3, size=16)
    check(data)
    assert list(data) == list(open_dataset(source, base_dir=folder, seed=3, size=16))
    assert [row.prompt for row in data] != [row.prompt for row in open_dataset(source, base_dir=folder, seed=3, size=16, split="test")]
    assert len(data) == 16
    assert all((row.prompt or "")[1].isupper() and len(row.columns["answer"]) <= 8 for row in data)


@pytest.mark.skipif(not GSM8K.is_file(), reason="no GSM8K beside the repository")
def test_gsm8k_is_readable_throughout() -> None:
    data = open_dataset(str(GSM8K), prompt_field="question", answer_field="answer")
    check(data)
    assert len(data) == 7473
    assert "####" in data[7472].columns["answer"]
