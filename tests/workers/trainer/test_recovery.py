"""What is committed is never lost: a trainer that comes back goes on from its newest checkpoint, bit for bit, and says so."""

import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.infra.errors import Unrecoverable
from penstock.infra.memory.log import MemoryLog
from penstock.infra.tensors.stream import digest
from penstock.infra.tensors.torch_copy import to_bytes
from penstock.pipeline.inspect.run_view import load
from penstock.pipeline.learner.ledger_history import read_ledger_history
from penstock.pipeline.runtime.session import Session, join
from penstock.topics import metrics
from penstock.topics.groups import Group
from penstock.workers.trainer.resuming import Resumed
from penstock.workers.trainer.worker import Trainer
from tests.support.processes import Processes
from tests.support.trainer_alone import config_for, group_of, killed, stopped_after, trained, write_groups, written
from tests.support.worker_set import WorkerSet, config_of

pytestmark = pytest.mark.usefixtures("checkpoints_at_once")


@pytest.fixture
def log() -> MemoryLog:
    return MemoryLog()


def values_of(log: MemoryLog, run: str) -> Mapping[str, float]:
    return load(log, run).workers["trainer"].values


def rounds(count: int, *, per_version: int) -> list[Group]:
    """Groups for whole rounds, each drawn under the version of its round."""
    return [group_of(number, version=number // per_version) for number in range(count)]


KINDS: dict[str, tuple[dict[str, dict[str, Any]], list[Group]]] = {
    # killed at a checkpoint inside a round; the KL's reference stays version 0 and the rate goes on falling
    "round by round": (
        {
            "schedule": {"mode": "synchronous", "steps_per_version": 2}, "algorithm": {"kl_coef": 0.1},
            "trainer": {"checkpoint_every": 3, "lr_schedule": "linear", "warmup_steps": 2},
        },
        rounds(12, per_version=4),
    ),
    # S does not divide the steps, and the moments of bfloat16 weights have masters beside them
    "a last round cut short": (
        {
            "run": {"steps": 5, "seed": 7}, "schedule": {"mode": "pipelined", "steps_per_version": 2},
            "trainer": {"checkpoint_every": 3, "dtype": "bfloat16"},
        },
        rounds(10, per_version=4),
    ),
    # one partition: only then is the order of arrival the same every time
    "in order of arrival, every second group dropped": (
        {
            "schedule": {"order": "arrival", "max_lag": 9}, "kafka": {"partitions": 1}, "rollout": {"workers": 1},
            "trainer": {"checkpoint_every": 3},
        },
        [group_of(number, version=0, outcome="filtered" if number % 2 else "scored") for number in range(24)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_trainer_killed_at_or_after_a_checkpoint_ends_in_the_same_run(run_id, log, tiny_model, tmp_path: Path, kind: str):
    sections, found = KINDS[kind]
    config = config_for(tiny_model, tmp_path, **sections)
    written(log, f"{run_id}-plain", config, found)
    plain = trained(log, f"{run_id}-plain")
    for name, fault, repeated in (("at", "checkpoint.renamed:1", 0), ("after", "ledger.step.after:5", 2)):
        written(log, f"{run_id}-{name}", config, found)
        assert trained(log, f"{run_id}-{name}", fault) == plain
        values = values_of(log, f"{run_id}-{name}")
        assert (values["recovered_from_step"], values["repeated_steps"]) == (3, repeated)
        assert values["recovery_s"] > 0


def spoil(directory: Path) -> None:
    file = max(directory.rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else 0)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize(("spoilt", "start"), [((4,), 2), ((4, 2), 0)])
def test_a_damaged_checkpoint_is_named_and_the_one_before_or_the_whole_log_is_used(
    run_id, log, tiny_model, tmp_path: Path, capsys: pytest.CaptureFixture[str], spoilt: tuple[int, ...], start: int
):
    config = config_for(tiny_model, tmp_path, trainer={"checkpoint_dir": str(tmp_path / "kept")})
    found = rounds(12, per_version=2)
    written(log, f"{run_id}-plain", config, found)
    plain = trained(log, f"{run_id}-plain")
    written(log, run_id, config, found)
    killed(log, run_id, "ledger.step.after:5")
    for steps in spoilt:
        spoil(tmp_path / "kept" / run_id / f"step-{steps:08d}")
    capsys.readouterr()
    assert trained(log, run_id) == plain
    said, values = capsys.readouterr().out, values_of(log, run_id)
    for steps in spoilt:
        assert f"checkpoint of step {steps} cannot be used: backend/trainer.pt is damaged" in said
    origin = f"checkpoint of step {start} loaded" if start else "no checkpoint to start from"
    assert f"{origin}" in said
    assert f"{5 - start} of 5 steps repeated from the log" in said
    assert (values["recovered_from_step"], values["repeated_steps"]) == (start, 5 - start)


def test_an_orderly_stop_writes_a_checkpoint_and_a_wish_to_end_is_heard_after_a_restart(run_id, log, tiny_model, tmp_path: Path):
    config = config_for(
        tiny_model, tmp_path, trainer={"checkpoint_every": 50}, eval={"source": str(tmp_path / "data.jsonl"), "target": 0.9}
    )
    found = rounds(12, per_version=2)
    written(log, run_id, config, found[:6])
    stopped_after(log, run_id, steps=3)
    write_groups(log, run_id, found[6:], partitions=config.partitions)
    evaluator = session_of(log, run_id, "evaluator")
    stop = {"ask": "stop", "reason": "good enough"}
    evaluator.reporter.send(kind="eval", values={"greedy_accuracy": 1.0}, version=3, labels=stop, control=True)
    evaluator.close(status="finished")
    outcome, values = trained(log, run_id), values_of(log, run_id)
    assert (outcome["status"], len(outcome["steps"])) == ("finished", 3)  # groups for more were there
    assert (values["recovered_from_step"], values["repeated_steps"]) == (3, 0)


def session_of(log: MemoryLog, run: str, role: str) -> Session:
    session = join(run=run, role=role, log=log, worker=role, model=None, stop=threading.Event())
    assert session is not None
    return session


def opened(session: Session) -> tuple[Trainer, Any]:
    transactions = session.log.transactions(f"{session.run}.trainer")
    past = read_ledger_history(session.log, session.run)
    return Trainer.open(session, transactions, Resumed(past=past)), past


@pytest.fixture
def three_steps(run_id, log, tiny_model, tmp_path: Path) -> Callable[[], tuple[Trainer, Any]]:
    """A run of which a trainer, stopped since, has done three steps; opens another trainer for it."""
    written(log, run_id, config_for(tiny_model, tmp_path, trainer={"checkpoint_every": 0}), rounds(6, per_version=2))
    stopped_after(log, run_id, steps=3)
    return lambda: opened(session_of(log, run_id, "trainer"))


def test_what_the_ledger_contradicts_stops_the_trainer_with_the_numbers(three_steps: Callable[[], tuple[Trainer, Any]]):
    bits = r".*, recorded .* \(bits -?\d+ and -?\d+\)"
    for field, built in (
        ("loss_bits", f"loss {bits}"),
        ("grad_norm_bits", f"gradient norm {bits}"),
        ("digest", r"weights blake3:[0-9a-f]{9}…, recorded e{16}…"),
    ):
        trainer, past = three_steps()
        at = next(place for place, entry in enumerate(past.entries) if entry.kind == "step" and entry.step == 1)
        changed, entry = list(past.entries), past.entries[at]
        changed[at] = replace(entry, **{field: "e" * 64 if field == "digest" else getattr(entry, field) + 1})
        with pytest.raises(Unrecoverable, match=f"step 1 repeated from the log gave {built}"):
            trainer.start(Resumed(past=replace(past, entries=changed)))


def test_a_planned_group_that_is_another_one_now_stops_the_trainer(three_steps: Callable[[], tuple[Trainer, Any]]):
    trainer, past = three_steps()
    plan = [replace(planned, sha256="0" * 64) for planned in past.steps[2].plan]
    changed = [replace(entry, plan=tuple(plan)) if entry.kind == "step" and entry.step == 2 else entry for entry in past.entries]
    with pytest.raises(Unrecoverable, match=r"groups/0/\d+ contains group 4 .*, but the ledger records group 4 \(0000"):
        trainer.start(Resumed(past=replace(past, entries=changed)))
    with pytest.raises(Unrecoverable, match="commits step 2, expected 1"):
        replace(past, entries=[entry for entry in past.entries if entry.kind != "step" or entry.step != 1])


def half(first: int, dropped: int) -> list[Group]:
    """Six groups to train behind so many that are dropped."""
    numbers = range(first, first + dropped + 6)
    return [group_of(number, version=0, outcome="filtered" if number < first + dropped else "scored") for number in numbers]


def test_drops_before_the_last_step_are_not_counted_again_after_a_restart(run_id, log, tiny_model, tmp_path: Path):
    config = config_for(tiny_model, tmp_path, schedule={"max_lag": 9, "max_drops_per_step": 6})
    written(log, run_id, config, half(0, 6))
    stopped_after(log, run_id, steps=3)
    trainer, past = opened(session_of(log, run_id, "trainer"))
    trainer.start(Resumed(past=past))
    assert trainer.arrivals.inbox.selector.drops == past.drops == 6
    write_groups(log, run_id, half(12, 6), partitions=config.partitions)
    outcome = trained(log, run_id)
    assert (outcome["status"], [dropped for *_, dropped in outcome["steps"]]) == ("finished", [6, 0, 0, 6, 0, 0])


@pytest.mark.parametrize("first_half", [True, False])
def test_a_run_that_was_stopped_for_its_drops_is_resumed_and_counts_anew(run_id, log, tiny_model, tmp_path: Path, first_half: bool):
    config = config_for(tiny_model, tmp_path, schedule={"max_lag": 9, "max_drops_per_step": 6})
    written(log, run_id, config, half(0, 6 if first_half else 7))
    with WorkerSet(log, run_id) as worker_set:
        worker_set.start("trainer")
        if first_half:
            worker_set.wait(lambda: worker_set.report()["steps"] == 3)
            write_groups(log, run_id, half(12, 7), partitions=config.partitions)
        line = r"(\d+) groups were dropped (since|before) step ., .* \(6\): \1 filtered at reward 0\.5.*denser reward"
        with pytest.raises(AssertionError, match=line):
            worker_set.wait()
        assert worker_set.report()["status"] == "stopped"
    if not first_half:
        write_groups(log, run_id, half(13, 6), partitions=config.partitions)
    assert trained(log, run_id)["status"] == "finished"


def test_a_checkpoint_that_cannot_be_written_ends_the_trainer_and_the_run_goes_on_when_it_can(broker, run_id, tiny_model, tmp_path: Path):
    place = tmp_path / "kept"
    config = config_for(tiny_model, tmp_path, trainer={"checkpoint_dir": str(place)})
    found = rounds(12, per_version=2)
    twin = MemoryLog()
    written(twin, run_id, config, found)
    plain = trained(twin, run_id)
    shutil.rmtree(place)
    with WorkerSet(broker, run_id) as worker_set:
        written(worker_set.log, run_id, config, found[:6])
        worker_set.start("trainer")
        worker_set.wait(lambda: bool(list((place / run_id).glob("step-*"))))
        worker_set.stop("trainer")
        write_groups(worker_set.log, run_id, found[6:], partitions=config.partitions)
        with Processes(broker, run_id, tmp_path) as trainer:
            trainer.start("trainer", before=no_large_files)
            assert trainer.ended("trainer", limit_s=400.0) == 1
            lines = trainer.text("trainer").splitlines()
        (line,) = [line for line in lines if line.startswith("penstock: trainer: cannot write the checkpoint")]
        assert str(place / run_id) in line and "File too large" in line
        assert line.endswith(f"then: penstock run --resume {run_id}")
        assert trained(broker, run_id) == plain
        assert load(worker_set.log, run_id).workers["trainer"].values["recovered_from_step"] >= 2


def no_large_files() -> None:
    """A disk that is full for everything but small files."""
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))


def test_an_evaluator_that_is_replaced_measures_no_version_again(run_id, log, tiny_model, tmp_path: Path):
    held = {"source": str(tmp_path / "data.jsonl"), "limit": 2, "every": 2, "samples": 1}
    config = config_of(tiny_model, tmp_path, run={"steps": 4, "seed": 7}, eval=held)
    with WorkerSet(log, run_id) as worker_set:
        worker_set.create(config, ("evaluator", "trainer", "rollout", "feeder"))
        worker_set.wait(lambda: bool(worker_set.report()["eval"]))
        worker_set.stop("evaluator")
        worker_set.start("evaluator")
        worker_set.start("scorer")
        worker_set.wait()
        tail = worker_set.log.tail({(f"{run_id}.metrics", 0): "earliest"})
        found = [metrics.read(record, run=run_id)[1] for record in tail.read_to_end()]
        tail.close()
    measured = [one.version for one in found if one.kind == "eval"]
    assert sorted(measured) == sorted(set(measured)), measured
    assert {0, 4} <= set(measured)


def test_each_checkpoint_holds_the_model_as_transformers_loads_it(tiny_model: Path, tmp_path: Path, run_id: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    log = MemoryLog()
    config = config_for(tiny_model, tmp_path, trainer={"export": True, "checkpoint_dir": str(tmp_path)})
    written(log, run_id, config, [group_of(number, version=max(0, number // 2 - 1)) for number in range(12)])
    versions = dict(trained(log, run_id)["versions"])
    for steps in (4, 6):
        folder = tmp_path / run_id / f"step-{steps:08d}" / "model"
        assert digest(to_bytes(AutoModelForCausalLM.from_pretrained(folder).named_parameters())) == versions[steps]
        assert AutoTokenizer.from_pretrained(folder)("1+2=").input_ids
