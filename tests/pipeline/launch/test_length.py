"""A run that its data, its warm-up or an empty source make another one than was meant: refused or said in one line with the keys."""

from pathlib import Path
from typing import Any

import pytest

from penstock.pipeline.config.load import Config, ConfigError, from_table, load
from penstock.pipeline.data.open import open_dataset
from penstock.pipeline.launch.create import _check_length
from tests.support.least_config import LEAST


def config_of(**sections: Any) -> Config:
    return from_table({**LEAST, "run": {"steps": 2}, **sections})


def said(config: Config, *, rows: int) -> list[str]:
    lines = list[str]()
    _check_length(config, rows=rows, steps=config.steps(rows), notify=lines.append)
    return lines


@pytest.mark.parametrize(
    ("run", "rows", "warmup"),
    [({"steps": 2}, 9, 50), ({"steps": 2}, 9, 3), ({"epochs": 1.0}, 16, 3), ({"epochs": 3.0}, 80, 31), ({"steps": 1}, 8, 2)],
)
def test_a_warm_up_that_the_run_never_ends_is_refused(run: dict[str, Any], rows: int, warmup: int) -> None:
    config = config_of(run=run, trainer={"warmup_steps": warmup}, schedule={"prompts_per_step": 8})
    with pytest.raises(ConfigError, match=rf"^trainer\.warmup_steps = {warmup}: the run has {config.steps(rows)} steps, "):
        said(config, rows=rows)


@pytest.mark.parametrize("warmup", [0, 1, 2])
def test_a_warm_up_up_to_the_last_step_is_as_it_was_set(warmup: int) -> None:
    assert said(config_of(trainer={"warmup_steps": warmup}), rows=1000) == []


@pytest.mark.parametrize(("epochs", "rows", "prompts"), [(1.0, 3, 8), (2.0, 3, 8), (0.5, 8, 8), (1.0, 1, 2), (0.01, 100, 4)])
def test_epochs_that_are_shorter_than_a_step_are_refused(epochs: float, rows: int, prompts: int) -> None:
    line = rf"^run\.epochs = {epochs:g}: {rows} rows yield {int(epochs * rows)} prompts, fewer than one step needs; "
    with pytest.raises(ConfigError, match=line):
        said(config_of(run={"epochs": epochs}, schedule={"prompts_per_step": prompts}), rows=rows)


def test_epochs_without_a_single_prompt_are_to_be_raised() -> None:
    with pytest.raises(ConfigError, match=r"yield 0 prompts, .*; raise run\.epochs, or set run\.steps$"):
        said(config_of(run={"epochs": 0.3}, schedule={"prompts_per_step": 1}), rows=3)


@pytest.mark.parametrize(
    ("epochs", "rows", "prompts", "rest"), [(1.0, 3, 2, 1), (1.0, 10, 4, 2), (2.5, 9, 8, 6), (1.0, 8, 8, 0), (3.0, 8, 6, 0), (1.0, 5, 1, 0)]
)
def test_prompts_of_the_epochs_that_fill_no_step_are_said(epochs: float, rows: int, prompts: int, rest: int) -> None:
    lines = said(config_of(run={"epochs": epochs}, schedule={"prompts_per_step": prompts}), rows=rows)
    assert [f"the remaining {rest} are not trained on" in line for line in lines] == [True] * (rest > 0)


@pytest.mark.parametrize(("run", "rows", "prompts"), [({"steps": 2}, 1, 2), ({"steps": 2}, 3, 8), ({"epochs": 10.0}, 3, 8)])
def test_a_step_of_more_prompts_than_there_are_rows_is_said(run: dict[str, Any], rows: int, prompts: int) -> None:
    line = said(config_of(run=run, schedule={"prompts_per_step": prompts}), rows=rows)[-1]
    assert line.startswith(f"warning: the data has fewer rows ({rows}) than schedule.prompts_per_step ({prompts})")


@pytest.mark.parametrize(("rows", "prompts"), [(8, 8), (9, 8), (1, 1)])
def test_a_step_of_as_many_prompts_as_rows_is_usual(rows: int, prompts: int) -> None:
    assert said(config_of(schedule={"prompts_per_step": prompts}), rows=rows) == []


@pytest.mark.parametrize("source", ["", [], [""], None])
def test_an_empty_source_of_held_out_prompts_is_none(source: Any) -> None:
    assert config_of(eval={"source": source}).eval_sources == []


@pytest.mark.parametrize("override", ['eval.source=""', "eval.source=", "eval.source=''", "eval.source=[]"])
def test_evaluation_is_switched_off_by_an_empty_override(tmp_path: Path, override: str) -> None:
    file = tmp_path / "run.toml"
    file.write_text('run.steps = 1\nmodel.path = "m"\ndata.source = "d.jsonl"\neval.source = "e.jsonl"\n')
    assert load(file).eval_sources == [str(tmp_path / "e.jsonl")]
    assert load(file, [override]).eval_sources == []


@pytest.mark.parametrize("source", ["", [], [""], ["d.jsonl", ""]])
def test_an_empty_source_of_prompts_is_refused_by_its_key(source: Any) -> None:
    with pytest.raises(ConfigError, match=r"^data\.source: empty value"):
        config_of(data={"source": source})


def test_a_deleted_working_directory_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    for path in ("run.toml", str(tmp_path / "run.toml")):
        with pytest.raises(ConfigError, match="the working directory was deleted"):
            load(path)


@pytest.mark.parametrize("source", ["absent.jsonl", "absent.parquet", "absent/*.jsonl", "."])
def test_a_data_file_that_is_not_there_is_a_mistake_in_the_configuration(tmp_path: Path, source: str) -> None:
    with pytest.raises(ConfigError, match=r"there is no file|the folder contains no"):
        open_dataset(source, base_dir=tmp_path)
