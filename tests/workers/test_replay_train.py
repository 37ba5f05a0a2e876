"""A run's training done again from its log: the same bits without a worker, and other settings beside the recorded ones."""

import json
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.infra.kafka.log import KafkaLog
from penstock.infra.memory.log import MemoryLog
from penstock.pipeline.cli import main
from penstock.pipeline.learner.ledger_history import read_ledger_history
from penstock.pipeline.replay.recording import Recording
from penstock.pipeline.runtime.topic_reader import scan
from penstock.topics import groups
from penstock.topics.catalogue import RUNS_SPEC, RUNS_TOPIC, topics_of
from penstock.topics.wire.record import Outgoing, Record
from tests.support.a_run import with_group
from tests.support.bare_clients import python_client
from tests.support.recorded_run import RecordedRun
from tests.support.trainer_alone import config_for, group_of, outcome_of, trained, write_groups, written
from tests.support.worker_set import WorkerSet

ALTERED_STEP = 5


@pytest.fixture
def log(broker: str) -> Iterator[KafkaLog]:
    opened = KafkaLog(broker, client_id="tests")
    yield opened
    opened.close()


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a replay sets for its own process is put back."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def asked(recorded: RecordedRun, *words: str) -> list[str]:
    return ["replay", "train", recorded.run, "--bootstrap", recorded.bootstrap, "--json", *words]


def answered(capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, Any], str]:
    found = capsys.readouterr()
    return json.loads(found.out), found.err


def test_the_recorded_plans_give_the_recorded_bits_without_any_worker(recorded: RecordedRun, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(asked(recorded)) == 0
    messages, _ = answered(capsys)
    assert (messages["steps"], messages["matching_steps"], messages["first_difference"], messages["digests_compared"]) == (8, 8, None, 8)
    assert messages["digest"] == recorded.report["weights"]["digest"]
    assert (messages["fingerprint"], messages["whole"]) == ([], True)
    assert messages["times"]["replay_s"] > 0 and messages["times"]["recorded_busy_s"] > 0
    tokens = recorded.report["trainer_tokens"]
    assert tokens["computed"] < tokens["real"] <= tokens["padded"], "the run shared its prompts, and so did the replay"


def test_it_begins_at_a_checkpoint_where_there_is_one_and_needs_no_weights_of_the_model(
    recorded: RecordedRun, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_bytes((Path(recorded.config.model.path) / "config.json").read_bytes())
    assert main(asked(recorded, "--from-step", "5", "--to-step", "6", "--model", str(tmp_path))) == 0
    messages, said = answered(capsys)
    assert messages["start"] == {"step": 5, "checkpoint": 4, "repeated": 1}
    assert (messages["steps"], messages["matching_steps"]) == (2, 2)
    assert "using version 0 from the log" in said


def copied(log: KafkaLog, run: str, *, altered: int | None = None) -> MemoryLog:
    """A run's topics in another log, where they have other offsets; one token of group `altered` is another one."""
    made = MemoryLog()
    specs = topics_of(run, partitions=log.partitions(f"{run}.groups") or 0, weight_partitions=log.partitions(f"{run}.weights") or 0)
    made.create_topics({RUNS_TOPIC: RUNS_SPEC, **specs})
    producer = made.producer()
    for topic in [RUNS_TOPIC, *specs]:
        for record in scan(log, topic):
            producer.send(_with_another_token(record, run) if _is(record, run, altered) else _again(record))
    return made


def _again(record: Record) -> Outgoing:
    return Outgoing(topic=record.topic, partition=record.partition, key=record.key, headers=record.headers, value=record.value)


def _is(record: Record, run: str, group: int | None) -> bool:
    return group is not None and record.topic == f"{run}.groups" and groups.check(record, run=run).group == group


def _with_another_token(record: Record, run: str) -> Outgoing:
    group = groups.read(record, run=run)[1]
    tokens = group.samples[2].rollout.token_ids.copy()
    tokens[1] = tokens[1] + 1 if tokens[1] < 90 else 5
    scored = replace(group.samples[2], rollout=replace(group.samples[2].rollout, token_ids=tokens))
    other = replace(group, samples=(*group.samples[:2], scored, *group.samples[3:]))
    return with_group(_again(record), other, run=run)[0]


def replayed(log: Any, run: str, **wanted: Any) -> dict[str, Any]:
    from penstock.pipeline.replay.steps import ReplayRequest
    from penstock.pipeline.replay.verify import ReplayResult, replay

    recording, result = Recording.open(log, run), ReplayResult(run)
    replay(recording, ReplayRequest(**wanted), result=result, notify=lambda _: None)
    recording.close()
    return result.as_json()


def test_one_altered_token_is_reported_with_step_group_sample_and_place(log: KafkaLog, recorded: RecordedRun) -> None:
    planned = read_ledger_history(log, recorded.run).steps[ALTERED_STEP].plan[2]
    other = copied(log, recorded.run, altered=planned.group)
    messages = replayed(other, recorded.run)
    assert (messages["steps"], messages["matching_steps"]) == (ALTERED_STEP + 1, ALTERED_STEP)
    first = messages["first_difference"]
    assert (first["step"], first["cause"]) == (ALTERED_STEP, "records")
    (group,) = first["groups"]
    assert (group["group"], group["partition"], group["offset"]) == (planned.group, planned.partition, planned.offset)
    assert f"expected {planned.sha256[:16]}" in group["problem"]
    ((sample, (difference,)),) = [(row["sample"], row["differences"]) for row in group["samples"]]
    assert (sample, difference["field"], difference["token"]) == (2, "token_ids", 1)
    assert {number["name"] for number in first["numbers"]} == {"loss", "gradient norm", "weights digest"}
    tensors = first["tensors"]
    assert tensors and all(0 < tensor["differing"] <= tensor["elements"] and tensor["max_abs"] > 0 for tensor in tensors)
    on = replayed(other, recorded.run, keep_going=True)
    assert (on["steps"], on["matching_steps"], on["first_difference"]["step"]) == (8, ALTERED_STEP, ALTERED_STEP)
    assert [row["step"] for row in on["drift"]] == [5, 6, 7]
    assert all(row["max_abs"] > 0 for row in on["drift"])


def test_groups_that_stand_at_other_offsets_are_found_by_their_digest(log: KafkaLog, recorded: RecordedRun) -> None:
    messages = replayed(copied(log, recorded.run), recorded.run, to_step=2)
    assert (messages["steps"], messages["matching_steps"], messages["first_difference"]) == (3, 3, None)


@pytest.mark.parametrize(
    ("changed", "name", "text"),
    [({"torch": "1.0"}, "torch", "torch 1.0 -> "), ({"forward": None}, "forward", "forward padded rows, logits whole -> shared rows")],
    ids=["another version", "a run from before prompts were shared"],
)
def test_another_arithmetic_is_said_before_anything_is_computed(
    recorded: RecordedRun, log: KafkaLog, changed: dict[str, str | None], name: str, text: str
) -> None:
    from penstock.pipeline.replay.steps import ReplayRequest
    from penstock.pipeline.replay.verify import ReplayResult, replay

    recording, said = Recording.open(log, recorded.run), list[str]()
    opened = recording.entries[0]
    details = json.loads(opened.details or "{}")
    details["fingerprint"] = {key: value for key, value in (details["fingerprint"] | changed).items() if value is not None}
    recording.ledger_state.opened = replace(opened, details=json.dumps(details))
    result = ReplayResult(recorded.run)
    replay(recording, ReplayRequest(to_step=0), result=result, notify=said.append)
    recording.close()
    assert [row["name"] for row in result.fingerprint] == [name]
    assert f"hardware or libraries differ from the run's, so results may not be bit-identical: {text}" in said[0]


def test_the_source_of_an_own_loss_is_part_of_the_arithmetic(recorded: RecordedRun, tmp_path: Path) -> None:
    from types import SimpleNamespace

    from penstock.pipeline.config.load import override
    from penstock.pipeline.learner.policy_trainer import arithmetic_of

    backend: Any = SimpleNamespace(fingerprint=lambda: {"torch": "2"})
    loss = tmp_path / "own.py"
    config = override(recorded.config, [f"algorithm.loss={loss}:loss", "algorithm.aggregate=token_mean"])
    loss.write_text("def loss(*_, **__): return 1")
    before = arithmetic_of(backend, config)
    loss.write_text("def loss(*_, **__): return 2")
    assert arithmetic_of(backend, config)["torch"] == before["torch"] == "2"
    assert arithmetic_of(backend, config)["algorithm.loss"] != before["algorithm.loss"]
    assert arithmetic_of(backend, recorded.config) == {"torch": "2"}


def test_a_what_if_is_a_child_run_in_mlflow_with_its_curves_beside_the_recorded_ones(
    recorded: RecordedRun, log: KafkaLog, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from mlflow import MlflowClient

    assert main(asked(recorded, "--set", "algorithm.loss=dr_grpo", "--export", str(tmp_path / "model"))) == 0
    messages, _ = answered(capsys)
    assert (messages["kind"], messages["steps"], messages["plans"]) == ("what-if", 8, "recorded")
    assert messages["changed"] == {"algorithm.loss": {"recorded": "grpo", "here": "dr_grpo"}}
    assert messages["digest"] != messages["recorded_digest"] == recorded.report["weights"]["digest"]
    assert (tmp_path / "model" / "config.json").is_file()
    client = MlflowClient(tracking_uri=recorded.mlflow_uri)
    child = client.get_run(messages["mlflow_run_id"])
    parent = client.get_run(child.data.tags["mlflow.parentRunId"])
    assert parent.data.tags["penstock.run"] == recorded.run
    assert (child.info.status, child.info.experiment_id) == ("FINISHED", parent.info.experiment_id)
    assert child.data.tags["penstock.changed"] == "algorithm.loss grpo -> dr_grpo"
    assert "penstock.off_policy" in child.data.tags
    assert child.data.params["algorithm.loss"] == "dr_grpo"
    steps = read_ledger_history(log, recorded.run).steps
    curves = {name: client.get_metric_history(child.info.run_id, name) for name in ("train/loss", "recorded/loss", "train/ess")}
    assert [point.step for point in curves["train/loss"]] == list(range(8))
    assert [point.value for point in curves["recorded/loss"]] == [entry.metrics["loss"] for entry in steps]
    assert [point.value for point in curves["train/loss"]] == [row["what_if"]["loss"] for row in messages["curves"]]
    assert curves["train/ess"][0].value == pytest.approx(1.0, abs=1e-3)
    assert "train/kl_behaviour_k3" in child.data.metrics


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--set", "rollout.workers=1"], "a replay cannot change rollout.workers: samples are recorded"),
        (["--to-step", "8"], "has committed steps 0 to 7"),
        (["--mlflow"], "--mlflow needs --set or --without"),
        (["--export", "made"], "--export needs --set or --without"),
        (["--set", "algorithm.loss=gspo", "--keep-going"], "--keep-going cannot be combined with"),
        (["--set", "algorithm.loss=gspo", "--export", f"{__file__}/made"], "is not writable"),
    ],
)
def test_what_cannot_be_replayed_or_would_do_nothing_or_fail_in_the_end_is_refused_at_once(
    recorded: RecordedRun, words: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(asked(recorded, *words)) == 2
    assert why in capsys.readouterr().err


def test_another_filter_and_order_make_plans_anew(recorded: RecordedRun, capsys: pytest.CaptureFixture[str]) -> None:
    changes = ("algorithm.filter_zero_variance=false", "schedule.order=arrival", "schedule.prompts_per_step=6")
    words = [word for change in changes for word in ("--set", change)]
    assert main(asked(recorded, *words, "--no-mlflow")) == 0
    messages, _ = answered(capsys)
    fates = recorded.report["groups"]
    scored = fates["trained"] + fates["filtered"] + fates.get("stale", 0)
    assert scored // 6 <= messages["steps"] <= (scored + fates["unused"]) // 6
    assert (messages["plans"], messages["mlflow_run_id"]) == ("recomputed from the scored groups", None)


def test_a_second_trainer_with_another_loss_follows_a_live_run_and_leaves_the_first_as_it_is(
    run_id: str, tiny_model: Path, tmp_path: Path
) -> None:
    from penstock.pipeline.replay.overrides import what_if
    from penstock.pipeline.replay.steps import ReplayRequest
    from penstock.pipeline.replay.what_if import WhatIfResult, train

    config = config_for(tiny_model, tmp_path, trainer={"checkpoint_every": 0})
    found = [group_of(number, version=number // 2) for number in range(12)]
    log = MemoryLog()
    written(log, f"{run_id}-plain", config, found)
    plain = trained(log, f"{run_id}-plain")
    written(log, run_id, config, found[:6])
    recording = Recording.open(log, run_id)
    result = WhatIfResult(run_id, {})
    chosen = what_if(recording.config, ["algorithm.loss=dr_grpo"])
    wanted = {"result": result, "curves": nullcontext(), "export": None, "notify": lambda _: None}
    follower = threading.Thread(target=train, args=(recording, chosen, ReplayRequest(follow=True)), kwargs=wanted)
    follower.start()
    with WorkerSet(log, run_id) as worker_set:
        worker_set.start("trainer")
        worker_set.wait(lambda: len(result.steps) == 3)
        write_groups(log, run_id, found[6:], partitions=config.partitions)
        worker_set.wait()
    follower.join(60.0)
    recording.close()
    assert (len(result.steps), result.whole) == (6, True)
    assert outcome_of(log, run_id) == plain
    assert result.digest != plain["digest"]


def test_a_replay_whose_records_are_deleted_names_their_offsets(
    broker: str, run_id: str, log: KafkaLog, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from kafka import KafkaAdminClient, TopicPartition

    config = config_for(tiny_model, tmp_path, run={"steps": 3, "seed": 7}, trainer={"checkpoint_every": 2})
    written(log, run_id, config, [group_of(number, version=number // 2) for number in range(6)])
    trained(broker, run_id)
    admin = KafkaAdminClient(**python_client(broker))
    admin.delete_records({TopicPartition(f"{run_id}.groups", 1): 2})
    admin.close()
    assert main(["replay", "train", run_id, "--bootstrap", broker]) == 1
    said = capsys.readouterr().err
    assert f"steps 0-1 of {run_id} cannot be replayed" in said
    assert f"{run_id}.groups/1 offsets 0-1 (retained from 2 on)" in said
    assert main(["replay", "train", run_id, "--bootstrap", broker, "--from-step", "2"]) == 0  # from the checkpoint behind them
    capsys.readouterr()
    assert main(["fork", run_id, "--bootstrap", broker, "--from-step", "1"]) == 1
    assert f"{run_id}.groups/1 offsets 0 (retained" in capsys.readouterr().err
    assert main(["replay", "train", run_id, "--bootstrap", broker, "--set", "schedule.order=arrival"]) == 1
    assert f"because groups were deleted: {run_id}.groups/1: the records at offsets 0 to 1 were deleted" in capsys.readouterr().err
