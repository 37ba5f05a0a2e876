"""`penstock plan --cluster`: the planned bytes are those that a run has written."""

import json
from pathlib import Path

import pytest

from penstock.infra.kafka.log import KafkaLog
from penstock.pipeline import cli
from penstock.pipeline.launch.planning.cluster import ClusterPlan
from penstock.topics import groups
from tests.support.launched import toml_of
from tests.support.recorded_run import RecordedRun
from tests.support.worker_set import config_of, records_of


def test_the_planned_bytes_are_those_that_a_run_has_written_within_a_fifth(
    recorded: RecordedRun, log: KafkaLog, penstock_home: Path
) -> None:
    samples = [
        sample for record in records_of(log, f"{recorded.run}.groups") for sample in groups.read(record, run=recorded.run)[1].samples
    ]
    ended = recorded.report["groups"]
    plan = ClusterPlan(
        config=recorded.config, step_s=1.0, machines=2, dropped=1 - ended["trained"] / ended["admitted"],
        prompt_tokens=6, tokens=round(sum(len(sample.rollout.token_ids) for sample in samples) / len(samples)),
    )  # fmt: skip
    planned = {load.topic: load.disk for load in plan.loads()}
    data = penstock_home / "broker" / "data"
    written = {topic: sum(file.stat().st_size for file in data.glob(f"{recorded.run}.{topic}-*/*.log")) for topic in planned}
    statuses = len(records_of(log, f"{recorded.run}.metrics"))
    planned["metrics"] *= statuses / (plan.steps * plan.step_s * 6)
    assert sum(planned.values()) == pytest.approx(sum(written.values()), rel=0.2)
    del planned["ledger"]  # its first entry, with the configuration, is as long as those of eight steps
    assert {topic: planned[topic] / written[topic] for topic in planned} == pytest.approx(dict.fromkeys(planned, 1.0), rel=0.2)


def test_the_command_plans_for_other_numbers_of_workers_and_machines(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = toml_of(config_of(tiny_model, tmp_path, kafka={"bootstrap": "kafka:9092", "partitions": None}), tmp_path)

    def figures(*words: str) -> dict[str, float]:
        assert cli.main(["plan", "--cluster", str(file), "--step-s", "10", "--json", *words]) == 0
        return json.loads(capsys.readouterr().out)

    two, many = figures(), figures("--workers", "64", "--machines", "8")
    assert (two["replicas"], two["partitions"], many["rollout_workers"]) == (3, 3 * (3 * 8 + 11 + 11), 64)
    assert many["written_per_s"] > two["written_per_s"]
    assert many["read_per_s"] > 3 * two["read_per_s"]
    assert cli.main(["plan", "--cluster", str(file), "--step-s", "10", "--lengths", "constant:100"]) == 0
    assert "completions of 100 tokens on average" in capsys.readouterr().out
    assert cli.main(["plan", "--cluster", str(file)]) == 2
    assert "--cluster needs --step-s" in capsys.readouterr().err
