"""The facade: what a user's program imports, on a run written record by record into the real broker, and on one that it launches."""

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import penstock
from penstock.infra.kafka.log import KafkaLog
from penstock.opened import Run
from penstock.pipeline.archive.index import group_rows
from penstock.pipeline.inspect.tables import run_tables
from penstock.topics import groups, rollouts
from penstock.topics.catalogue import RUNS_SPEC, RUNS_TOPIC, topics_of
from penstock.topics.wire.record import Outgoing
from tests.support import page_records
from tests.support.a_run import RecordBuilder, outgoing, with_group

ROOT = Path(__file__).resolve().parents[1]
STEPS = 3
GROUPS = 2 + 2 * STEPS
"""One filtered, two a step, one unused."""


def write(bootstrap: str, run: str, records: list[Outgoing]) -> None:
    log = KafkaLog(bootstrap, client_id="test")
    log.create_topics({RUNS_TOPIC: RUNS_SPEC})
    log.create_topics(topics_of(run, partitions=2))
    page_records.write(log, records)
    log.close()


@pytest.fixture(scope="module")
def run(broker: str) -> Iterator[Run]:
    """A finished run of three steps, with a sample written twice and a record of nobody's in each of its topics; tests only read it."""
    run_id = f"facade-{uuid.uuid4().hex[:6]}"
    built = list(RecordBuilder(run_id, steps=STEPS).whole())
    again = next(record for record in built if record.topic.endswith(".rollouts"))
    nobodys = [
        Outgoing(topic=f"{run_id}.{topic}", partition=0, key=None, headers=(("run", b"other"),), value=b"?")
        for topic in ("prompts", "rollouts", "groups", "ledger")
    ]
    write(broker, run_id, [*built, again, *nobodys])
    with penstock.open(run_id, bootstrap=broker) as opened:
        yield opened


def test_importing_the_facade_imports_neither_pyarrow_nor_anything_heavier() -> None:
    code = "import sys, penstock; print([name for name in ('pyarrow', 'kafka', 'pydantic', 'torch') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=180, check=True)
    assert done.stdout.strip() == "[]"


def test_the_report_is_that_of_the_command_line(run: Run) -> None:
    report = run.report()
    assert report["run"] == run.id
    assert report["steps"] == STEPS
    assert report["groups"]["admitted"] == GROUPS


def test_samples_are_one_row_each_with_tokens_as_lists_and_their_rewards(run: Run) -> None:
    table = run.samples()
    assert table.schema == run_tables.SAMPLES
    assert table.num_rows == 4 * GROUPS
    assert table["group"].to_pylist() == [group for group in range(GROUPS) for _ in range(4)]
    assert table["sample"].to_pylist() == [0, 1, 2, 3] * GROUPS
    assert table["token_ids"][0].as_py() == [0, 1, 2]
    assert table["token_ids"][-1].as_py() == list(range(9))
    assert set(table["completion"].to_pylist()) == {"5"}
    # The filtered group, then two groups a step whose rewards grow from 0 to 1, then the unused group.
    assert table["reward"].to_pylist()[::4] == [0.0, 0.0, 0.0, 0.5, 0.5, 1.0, 1.0, 1.0]


def test_groups_are_one_row_each_with_their_fate(run: Run) -> None:
    table = run.groups()
    assert table.schema == group_rows.GROUPS
    assert table["status"].to_pylist() == ["filtered", *["trained"] * (2 * STEPS), "unused"]
    assert table["reason"].to_pylist()[:2] == ["because", None]
    assert table["reward_mean"].to_pylist() == [0.0, 0.0, 0.0, 0.5, 0.5, 1.0, 1.0, 1.0]
    assert table["prompt_ids"][0].as_py() == [1, 2]
    assert table["policy_version_min"].to_pylist() == [0, 0, 0, 1, 1, 2, 2, 2]


def test_steps_are_one_row_each_with_a_column_for_each_metric(run: Run) -> None:
    table = run.steps()
    assert table["step"].to_pylist() == list(range(STEPS))
    assert table["groups"].to_pylist() == [[1, 2], [3, 4], [5, 6]]
    assert table["loss"].to_pylist() == [1.0, 0.5, pytest.approx(1 / 3)]
    assert table.schema.field("loss").type == pa.float64()


def test_a_run_without_records_has_typed_tables_without_rows(broker: str, run_id: str) -> None:
    write(broker, run_id, [RecordBuilder(run_id).record()])
    with penstock.open(run_id, bootstrap=broker) as run:
        assert run.samples() == run_tables.SAMPLES.empty_table()
        assert run.groups() == group_rows.GROUPS.empty_table()
        assert run.steps() == group_rows.STEPS.empty_table()
        assert run.turns() == run_tables.TURNS.empty_table()


def test_a_sample_whose_group_is_not_scored_has_no_reward_and_an_open_fate(broker: str, run_id: str) -> None:
    builder = RecordBuilder(run_id)
    unscored = [record for record in builder.group([1.0, 0.0], version=0) if not record.topic.endswith(".groups")]
    write(broker, run_id, [builder.record(), builder.opened(), *unscored])
    with penstock.open(run_id, bootstrap=broker) as run:
        assert run.samples()["reward"].to_pylist() == [None, None]
        assert run.groups()["status"].to_pylist() == ["open"]
        assert run.groups()["reward_mean"].to_pylist() == [None]


def test_a_group_in_parts_counts_once_it_is_whole(broker: str, run_id: str) -> None:
    builder = RecordBuilder(run_id)
    built = builder.group([1.0, 0.0, 0.5], version=0)
    parts = with_group(built[-1], groups.decode(built[-1].value), run=run_id, max_bytes=1)
    assert len(parts) == 3
    write(broker, run_id, [builder.record(), *built[:-1], *parts[:2]])
    with penstock.open(run_id, bootstrap=broker) as run:
        assert run.samples()["reward"].to_pylist() == [None, None, None]
        write(broker, run_id, parts[2:])
        assert run.samples()["reward"].to_pylist() == [1.0, 0.0, 0.5]


def test_logprobs_of_tokens_the_model_did_not_draw_are_null(broker: str, run_id: str) -> None:
    builder = RecordBuilder(run_id)
    drawn = rollouts.decode(builder.group([1.0, 0.0], version=0)[1].value)
    sample = replace(drawn, behaviour_logprobs=np.array([0.0, np.nan, 0.0], np.float32), loss_mask=np.array([True, False, True]))
    write(broker, run_id, [builder.record(), outgoing(rollouts, sample, run=run_id)])
    with penstock.open(run_id, bootstrap=broker) as run:
        assert run.samples()["behaviour_logprobs"][0].as_py() == [0.0, None, 0.0]


def test_an_unknown_run_is_one_line(broker: str, run_id: str) -> None:
    write(broker, run_id, [RecordBuilder(run_id).record()])
    with pytest.raises(ValueError, match=r"no run 'nowhere' on this broker"):
        penstock.open("nowhere", bootstrap=broker)


def test_overrides_go_with_a_configuration_object_too() -> None:
    from penstock.pipeline.config.load import ConfigError, load, override

    config = load(ROOT / "examples" / "demo.toml")
    assert override(config, ["schedule.prompts_per_step=3"]).schedule.prompts_per_step == 3
    assert override(config, []) == config
    with pytest.raises(ConfigError, match=r"did you mean 'schedule\.prompts_per_step'"):
        override(config, ["schedule.prompts_per_stp=3"])


def test_a_run_answers_in_sql_and_in_pictures(run: Run, tmp_path: Path) -> None:
    assert run.sql("select count(*) as rows, max(reward) as best from samples").to_pylist() == [{"rows": 4 * GROUPS, "best": 1.0}]
    picture = run.plot()
    assert [axes.get_title() for axes in picture.axes] == [
        "reward of the trained samples",
        "held-out, by version",
        "groups by final status",
    ]
    assert picture.axes[0].lines[0].get_ydata().tolist() == [0.0, 0.5, 1.0]
    picture.savefig(tmp_path / "run.png")
    assert (tmp_path / "run.png").stat().st_size > 5_000
    assert [axes.get_title() for axes in run.plot("loss", "grad_norm").axes] == ["loss", "grad_norm"]
    with pytest.raises(ValueError, match="there is no measure 'los'"):
        run.plot("los")
    page = run._repr_html_()
    assert "Too short to tell: reward 0.00 -&gt; 1.00" in page and "<polyline" in page


@pytest.mark.slow
@pytest.mark.usefixtures("broker")
def test_the_example_notebook_runs_from_its_first_cell_to_its_last(tmp_path: Path) -> None:
    from penstock.pipeline.data.tiny.model import make_tiny_model

    model = make_tiny_model(tmp_path / "model", steps=1)
    chosen = {"PENSTOCK_NOTEBOOK_MODEL": str(model), "PENSTOCK_NOTEBOOK_STEPS": "2", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", CELLS, str(ROOT / "examples" / "notebook.ipynb")]
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ, **chosen}, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    *_, overview, curves, answer = done.stdout.splitlines()
    assert overview.startswith("Figure(") and curves.startswith("Figure(")
    assert "columns" in answer


CELLS = """
import ast, json, linecache, sys

for number, cell in enumerate(json.load(open(sys.argv[1]))["cells"]):
    if cell["cell_type"] != "code":
        continue
    source, name = "".join(cell["source"]), f"<cell {number}>"
    linecache.cache[name] = len(source), None, source.splitlines(True), name  # as a notebook's kernel does, for `inspect`
    *before, last = ast.parse(source).body
    exec(compile(ast.Module(before, []), name, "exec"), globals())
    if isinstance(last, ast.Expr):
        shown = eval(compile(ast.Expression(last.value), name, "eval"), globals())
        if shown is not None:
            print(str(shown).replace("\\n", " ") + (f" [{len(shown.columns)} columns]" if hasattr(shown, "columns") else ""))
    else:
        exec(compile(ast.Module([last], []), name, "exec"), globals())
"""


@pytest.mark.slow
def test_a_launched_run_returns_its_report_and_can_be_read(broker: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from penstock.pipeline.data.tiny.model import make_tiny_model

    model = make_tiny_model(tmp_path / "model", steps=1)
    overrides = ["run.steps=2", "schedule.samples_per_prompt=4", "algorithm.filter_zero_variance=false", "eval.limit=4"]
    report = penstock.launch(
        ROOT / "examples" / "demo.toml",
        overrides=[*overrides, f'model.path="{model}"', f'kafka.bootstrap="{broker}"', "mlflow.enabled=false"],
    )
    assert capsys.readouterr().out == ""
    assert report["status"] == "finished"
    assert json.loads(json.dumps(report)) == report
    with penstock.open(report["run"], bootstrap=broker) as run:
        assert run.steps().num_rows == 2
        assert run.groups()["status"].to_pylist().count("trained") == report["groups"]["trained"] == 16
        assert run.samples().num_rows == report["samples"]
