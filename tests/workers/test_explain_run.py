"""`penstock explain` on a recorded run: a group of each fate, its figures those of the ledger and of MLflow, and its dead letters."""

import json
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.infra.engines import toy
from penstock.infra.kafka.log import KafkaLog
from penstock.infra.memory.log import MemoryLog
from penstock.pipeline import cli
from penstock.pipeline.inspect.explain import as_json, text
from penstock.pipeline.inspect.explain.group_history import read_group
from penstock.pipeline.inspect.recorded_run import read_run
from penstock.pipeline.learner.ledger_history import read_ledger_history, read_planned
from penstock.pipeline.learner.micro_batches import denominator, pack
from penstock.pipeline.learner.train_step import Objective
from tests.support.full_read import FullRead
from tests.support.in_flight import SlowGroups, config_in_flight, run_of
from tests.support.recorded_run import RecordedRun

Ask = Callable[[int], dict[str, Any]]


@pytest.fixture(scope="module")
def fates(recorded: RecordedRun, log: KafkaLog) -> dict[int, str]:
    """Group -> fate, as the tables have it."""
    found = FullRead(log, recorded.run).groups()
    return dict(zip(found["group"].to_pylist(), found["status"].to_pylist(), strict=True))


@pytest.fixture(scope="module")
def ask(recorded: RecordedRun, log: KafkaLog) -> Ask:
    """The life of a group, as `penstock explain --json` prints it; read once."""
    run = read_run(log, recorded.run)

    @cache
    def life_of(group: int) -> dict[str, Any]:
        life = as_json.life(read_group(run, group, notify=lambda _: None), notify=lambda _: None)
        return dict(json.loads(json.dumps(life)))

    return life_of


def one_of(fates: dict[int, str], fate: str) -> int:
    return next(group for group, found in fates.items() if found == fate)


def printed(recorded: RecordedRun, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    assert cli.main(["explain", recorded.run, *words, "--bootstrap", recorded.bootstrap]) == 0
    return capsys.readouterr().out


def points(recorded: RecordedRun) -> dict[tuple[str, int], float]:
    """(metric, step) -> value, as MLflow holds it."""
    import mlflow

    client = mlflow.MlflowClient(tracking_uri=recorded.mlflow_uri)
    known = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    (run,) = [one for one in known if one.data.tags.get("penstock.run") == recorded.run and "mlflow.parentRunId" not in one.data.tags]
    return {
        (name, point.step): point.value
        for name in run.data.metrics
        if name.startswith(("train/", "reward"))
        for point in client.get_metric_history(run.info.run_id, name)
    }


def test_a_trained_groups_figures_are_those_of_the_ledger_and_of_mlflow(
    recorded: RecordedRun, fates: dict[int, str], ask: Ask, log: KafkaLog
) -> None:
    held = points(recorded)
    first = ask(one_of(fates, "trained"))
    step = first["step"]["step"]
    members = {group: ask(group) for group in first["step"]["plan"]}
    samples = [sample for found in members.values() for sample in found["samples"]]

    past = read_ledger_history(log, recorded.run)
    entry = past.steps[step]
    assert [found["status"] for found in members.values()] == ["trained"] * len(members)
    assert first["step"]["plan"] == [planned.group for planned in entry.plan]
    assert first["step"]["boundaries"] == list(entry.boundaries)
    in_mlflow = {name: held[f"train/{name}", step] for name in ("reward_trained", "samples", "tokens", "lag_max", "lag_mean")}
    for measured in (entry.metrics, in_mlflow):
        assert math.fsum(sample["reward"] for sample in samples) / len(samples) == pytest.approx(measured["reward_trained"], rel=1e-12)
        assert len(samples) == measured["samples"]
        assert sum(sample["trained_tokens"] for sample in samples) == first["step"]["tokens"] == measured["tokens"]
        lags = [found["step"]["lag"] for found in members.values()]
        assert max(lags) == measured["lag_max"]
        assert sum(lags) / len(lags) == pytest.approx(measured["lag_mean"])
    assert held["train/loss", step] == first["step"]["metrics"]["loss"]
    # The micro-batches that the ledger's boundaries draw hold exactly the trained samples of the plan.
    sizes = np.diff([0, *entry.boundaries]).tolist()
    placed = [sample["micro_batch"] for sample in samples if sample["trained"] == "yes"]
    assert [placed.count(number) for number in range(len(sizes))] == sizes
    assert placed == sorted(placed)
    assert first["version"]["version"] == step + 1
    assert first["version"]["digest"] == past.ledger_state.manifests[step + 1].digest


def test_a_gradient_weight_is_minus_the_derivative_of_the_steps_loss_where_all_policies_are_equal(
    recorded: RecordedRun, fates: dict[int, str], ask: Ask, log: KafkaLog
) -> None:
    import torch

    found = ask(one_of(fates, "trained"))
    plan = read_planned(log, recorded.run, read_ledger_history(log, recorded.run).steps[found["step"]["step"]].plan)
    objective = Objective.of(recorded.config)
    batch = pack([sequence for group in plan for sequence in objective.sequences(group)])
    logprobs = torch.tensor(batch.behaviour_logprobs, requires_grad=True)
    loss, _ = objective.batch_loss(logprobs, batch, proximal=batch.behaviour_logprobs)
    count = denominator([batch.completion_mask], plan, aggregate=objective.aggregate, counts_untrained=objective.counts_untrained)
    (loss / count).backward()
    assert found["step"]["denominator"] == count
    assert logprobs.grad is not None
    for row, (group, sample) in enumerate(zip(batch.groups.tolist(), batch.samples.tolist(), strict=True)):
        if group != found["group"]:
            continue
        gradient = -logprobs.grad[row].numpy()[batch.completion_mask[row]]
        messages = next(one for one in found["samples"] if one["sample"] == sample)
        assert gradient == pytest.approx(np.full(messages["trained_tokens"], messages["token_weight"]), rel=1e-5, abs=1e-9)
        assert gradient.sum() == pytest.approx(messages["weight"], rel=1e-5, abs=1e-9)


def test_samples_are_those_of_the_tables_with_rewards_by_component(
    recorded: RecordedRun, fates: dict[int, str], ask: Ask, log: KafkaLog
) -> None:
    group = one_of(fates, "trained")
    found = ask(group)
    rows = [row for row in FullRead(log, recorded.run).samples().to_pylist() if row["group"] == group]
    for name in ("completion", "reward", "worker"):
        assert [one[name] for one in found["samples"]] == [row[name] for row in rows]
    assert [list(one["components"].values()) for one in found["samples"]] == [row["components"] for row in rows]
    assert {one["finish"] for one in found["samples"]} <= {"stop", "length"}
    for one, row in zip(found["samples"], rows, strict=True):
        spans = [span["version"] for span in one["versions"]]
        assert (min(spans), max(spans)) == (row["policy_version_min"], row["policy_version_max"])
        assert one["reward"] == pytest.approx(sum(w * c for w, c in zip(found["rewards"]["weights"], row["components"], strict=True)))


def test_the_stages_of_a_trained_group_add_up_to_its_life(
    recorded: RecordedRun, fates: dict[int, str], ask: Ask, capsys: pytest.CaptureFixture[str]
) -> None:
    found = ask(one_of(fates, "trained"))
    stages = {stage["name"]: stage for stage in found["times"]}
    whole = [stage for name, stage in stages.items() if not name.startswith("of it")]
    assert [stage["name"] for stage in whole] == [
        "waited for a worker", "generation", "waited for the scorer", "reward functions", "waiting for the trainer",
        "training", "publishing",
    ]  # fmt: skip
    assert all(stage["seconds"] >= 0 for stage in whole)
    assert sum(stage["seconds"] for stage in whole) == pytest.approx(found["moments"]["published"] - found["moments"]["admitted"])
    shown = printed(recorded, capsys, str(found["group"]))
    assert shown == text.as_page(found) + "\n"
    assert shown.startswith(f"group {found['group']} of run {recorded.run}: trained\n")
    assert "waiting for the trainer" in shown and str(found["version"]["digest"]) in shown


def test_a_filtered_group_says_which_rewards_it_was_filtered_for(fates: dict[int, str], ask: Ask) -> None:
    found = ask(one_of(fates, "filtered"))
    assert (found["status"], found["step"], found["version"], found["why"]) == ("filtered", None, None, found["outcome"]["reason"])
    assert found["why"].startswith("every sample has the reward ")
    assert {one["reward"] for one in found["samples"]} == {found["rewards"]["mean"]}
    assert f"{found['rewards']['mean']:.6g}" in text.as_page(found)


def test_a_filtered_groups_rewards_are_in_the_mean_that_mlflow_holds_and_a_failed_one_has_none(
    recorded: RecordedRun, fates: dict[int, str], ask: Ask, log: KafkaLog
) -> None:
    held = points(recorded)
    filtered, failed = ask(one_of(fates, "filtered")), ask(one_of(fates, "failed"))
    for found in (filtered, failed):
        drawn = {span["version"] for sample in found["samples"] for span in sample["versions"]}
        version = min(drawn)
        rows = FullRead(log, recorded.run).groups().to_pylist()
        others = {row["group"] for row in rows if row["policy_version_min"] == version and row["group"] != found["group"]}
        rewards = [row["reward"] for row in FullRead(log, recorded.run).samples().to_pylist() if row["group"] in others]
        rewards += [sample["reward"] for sample in found["samples"] if sample["reward"] is not None]
        assert held["reward_samples", version] == len(rewards)
        assert held["reward", version] == pytest.approx(math.fsum(rewards) / len(rewards))
    assert failed["rewards"] is None
    assert all(isinstance(sample["completion"], str) for sample in failed["samples"])  # what broke the reward can be seen
    assert filtered["outcome"]["reward_mean"] == filtered["rewards"]["mean"]


def test_a_failed_group_says_why_and_where_its_dead_letter_is(
    recorded: RecordedRun, fates: dict[int, str], ask: Ask, capsys: pytest.CaptureFixture[str]
) -> None:
    found = ask(one_of(fates, "failed"))
    assert (found["status"], found["rewards"]) == ("failed", None) and "cannot judge" in found["why"]
    assert len(found["samples"]) == found["prompt"]["samples_per_prompt"]
    (letter,) = found["dead_letters"]
    assert (letter["kind"], letter["of"]) == ("reward-failed", found["prompt"]["place"])
    assert f"dead-letters/0/{letter['offset']}" in text.as_page(found)

    at_letter = ["topics", "show", recorded.run, "dead-letters", "0", str(letter["offset"]), "--bootstrap", recorded.bootstrap]
    capsys.readouterr()
    assert cli.main([*at_letter, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["claims_group"] == found["group"]
    assert shown["refused"]["unusable"] is None
    assert cli.main(at_letter) == 0
    assert f"penstock explain RUN {found['group']}" in capsys.readouterr().out


def test_a_group_of_each_fate_has_the_fate_of_the_report(fates: dict[int, str], ask: Ask) -> None:
    chosen = [one_of(fates, fate) for fate in set(fates.values())] + [max(fates)]
    assert {number: ask(number)["status"] for number in chosen} == {number: fates[number] for number in chosen}
    assert all(record["counts"] for number in chosen for record in ask(number)["records"])


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "fate"), [({"mode": "bounded"}, "abandoned"), ({"mode": "in_flight", "max_lag": 1}, "stale")])
def test_groups_that_came_too_late_say_how_late(
    run_id: str, tiny_model: Path, tmp_path: Path, schedule: dict[str, Any], fate: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toy, "ToyEngine", SlowGroups)
    log = MemoryLog()
    report, samples, ended = run_of(log, run_id, config_in_flight(tiny_model, tmp_path, schedule=schedule))
    assert report["groups"][fate]
    fate_of = {row["group"]: row["status"] for row in FullRead(log, run_id).groups().to_pylist()}
    run = read_run(log, run_id)
    found = {}
    for number in (one_of(fate_of, fate), one_of(fate_of, "trained")):
        found[fate_of[number]] = as_json.life(read_group(run, number, notify=lambda _: None), notify=lambda _: None)
    late, trained = found[fate], found["trained"]
    versions = [sample["versions"] for sample in late["samples"]]
    drawn = {sample.sample: sample for sample in samples if sample.group == late["group"]}
    assert [[span["version"] for span in spans] for spans in versions] == [drawn[n].span_versions.tolist() for n in sorted(drawn)]
    if fate == "stale":
        oldest = min(span["version"] for spans in versions for span in spans)
        assert late["stale"]["policy_version_min"] == oldest
        assert late["stale"]["learner_version"] - oldest == late["stale"]["lag"] > late["stale"]["max_lag"] == 1
        assert late["stale"]["learner_version"] == late["stale"]["before_step"]  # S = 1
    else:
        assert "abort" in {sample["finish"] for sample in late["samples"]}
        assert late["why"] == next(group.reason for group in ended if group.group == late["group"])
    assert trained["step"]["lag"] <= trained["step"]["metrics"]["lag_max"] <= 1
    assert trained["step"]["tokens"] == trained["step"]["metrics"]["tokens"]
