"""A toy of every kind that CONTRIBUTING tells how to add, added as its row says and used; and the rows name what is there."""

import re
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from penstock.infra.backends import registry as backends
from penstock.infra.engines import registry as engines
from penstock.infra.engines.toy import ToyEngine
from penstock.infra.kafka.settings import Connection
from penstock.infra.memory.log import MemoryLog
from penstock.pipeline.agents.environments import sources as environments
from penstock.pipeline.algorithms import registry as algorithms
from penstock.pipeline.cli import app as cli
from penstock.pipeline.config.load import Config, ConfigError
from penstock.pipeline.config.schema import RunSection
from penstock.pipeline.data import open as sources
from penstock.pipeline.data.open import open_dataset, open_tiny
from penstock.pipeline.inspect.audit import report as audit_checks
from penstock.pipeline.inspect.audit.check import Check, Violation
from penstock.pipeline.inspect.audit.checks import prompts as prompt_checks
from penstock.pipeline.launch.supervisor import Supervisor
from penstock.pipeline.rewards import builtin as builtin_rewards
from penstock.pipeline.rewards import functions as rewards
from penstock.pipeline.runtime import roles
from penstock.pipeline.runtime.factories import make_backend, make_engine
from penstock.pipeline.scheduling import rules
from penstock.topics import catalogue, metrics
from tests.support.least_config import least_config
from tests.support.paths import ROOT

ROW = re.compile(r"^\| ([a-z ]+) \| (.+) \| (.+) \|$", re.MULTILINE)


def rows(heading: str) -> dict[str, tuple[str, str]]:
    """Task -> (files, test), as the table under a heading of CONTRIBUTING has them."""
    section = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition(f"## {heading}")[2].partition("\n## ")[0]
    return {task: (files, test) for task, files, test in ROW.findall(section) if task != "task"}


def test_every_row_has_a_toy_here_and_names_files_that_exist() -> None:
    table = rows("A new …")
    assert {f"test_a_new_{task.replace(' ', '_')}" for task in table} == {name for name in globals() if name.startswith("test_a_new_")}
    for files, test in table.values():
        named = re.findall(r"`(\w+/[\w/]*(?:\.py|\.md|))`", files + test)
        assert named
        assert [name for name in named if not (ROOT / name).exists()] == []


def test_every_answer_to_where_is_names_a_file_that_exists() -> None:
    section = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## Where is …")[2].partition("\n## ")[0]
    named = re.findall(r"`([\w/]+\.py)`", section)
    assert len(named) >= 12
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_a_new_role(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    toy = replace(roles.ROLES["tracker"], name="toy", single=False, workers=lambda _: 2)
    monkeypatch.setitem(roles.ROLES, "toy", toy)
    supervisor = Supervisor("r", Connection(bootstrap="127.0.0.1:1", client_id="tests"), least_config(), tmp_path, print)
    monkeypatch.setattr(Supervisor, "_start", lambda *_, **__: None)
    supervisor.start()
    assert [worker.name for worker in supervisor.workers if worker.role == "toy"] == ["toy-0", "toy-1"]
    assert roles.order("toy") == len(roles.ROLES) - 1
    assert "toy (any number): " in roles.as_text()
    assert toy.module == "penstock.workers.toy.worker"


def test_a_new_topic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "TOPICS", (*catalogue.TOPICS, "toys"))
    log = MemoryLog()
    log.create_topics(catalogue.topics_of("r", partitions=2))
    assert log.partitions(catalogue.topic_name("r", "toys")) == 1


def test_a_new_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(rules.MODES, "toy", rules.Schedule(mode="toy", starts_on="groups", loads_at="group", max_lag=3))
    assert least_config(schedule={"mode": "toy"}).rules.max_lag == 3


def test_a_new_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from penstock.pipeline.algorithms import losses
    from penstock.pipeline.learner.train_step import Objective

    monkeypatch.setitem(losses.SURROGATES, "toy", losses.policy_loss)
    monkeypatch.setitem(algorithms.LOSSES, "toy", algorithms.Loss(surrogate="toy", advantage="rloo", clip_high=0.5))
    chosen = least_config(algorithm={"loss": "toy"})
    assert (chosen.advantage, chosen.clip_high) == ("rloo", 0.5)
    assert Objective.of(chosen).aggregate == "sequence_mean"


def test_a_new_advantage(monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.pipeline.learner.micro_batches import advantage_function

    monkeypatch.setitem(algorithms.ADVANTAGES, "toy", lambda rewards: np.asarray(rewards, np.float32) * 2)
    assert advantage_function(least_config(algorithm={"advantage": "toy"}).advantage, trust_code=False)([1.0, 3.0]).tolist() == [2.0, 6.0]


def test_a_new_correction(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from penstock.pipeline.algorithms.losses import correction_weights

    monkeypatch.setitem(algorithms.CORRECTIONS, "toy", algorithms.Correction(unit="token", masks=True, low=0.9, high=1.1))
    assert least_config(algorithm={"correction": "toy", "proximal": "current"}).correction == "toy"
    weights, _ = correction_weights(torch.zeros(1, 2), torch.tensor([[0.0, 1.0]]), torch.ones(1, 2, dtype=torch.bool), correction="toy")
    assert weights.tolist() == [[1.0, 0.0]]


def test_a_new_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = replace(engines.ENGINES["toy"], open=lambda settings: ToyEngine(capacity=settings.concurrency), swaps_in_flight=False)
    monkeypatch.setitem(engines.ENGINES, "own", replace(kind, min_temperature=0.5, continuous_batching=True))
    engine = make_engine(least_config(rollout={"engine": "own"}))
    assert isinstance(engine, ToyEngine)
    assert least_config(rollout={"engine": "own", "concurrency": 16}, schedule={"samples_per_prompt": 8}).slots == 6
    with pytest.raises(ConfigError, match="changes weights between decode steps"):
        least_config(rollout={"engine": "own"}, schedule={"mode": "in_flight"})
    with pytest.raises(ConfigError, match=r"sampling.temperature: own would raise 0.4 to 0.5"):
        least_config(rollout={"engine": "own"}, sampling={"temperature": 0.4})


def test_a_new_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: dict[str, Any] = {}
    kind = replace(backends.BACKENDS["deepspeed"], open=opened.update, check=lambda trainer: "toy: no" if trainer["lr"] > 1 else None)
    monkeypatch.setitem(backends.BACKENDS, "toy", kind)
    make_backend(least_config(trainer={"backend": "toy", "zero_stage": 3}), steps=1)
    assert opened["zero_stage"] == 3
    with pytest.raises(ConfigError, match="toy: no"):
        least_config(trainer={"backend": "toy", "lr": 2.0})


def test_a_new_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(builtin_rewards.BUILTINS, "toy", lambda completions, **_: [float(len(text)) for text in completions])
    score = rewards.resolve(["toy"]).score(["a", "bcd"], prompt="p", messages=None, columns={})
    assert score.rewards == (1.0, 3.0)


def test_a_new_data_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sources.SCHEMES, "toy", open_tiny)
    assert len(open_dataset("toy:successor", size=8)) == 8


def test_a_new_environment_of_several_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(environments.SCHEMES, "toy", lambda name, _: environments.open_environment(f"tiny:{name}"))
    assert environments.open_environment("toy:lake").episode().tools == ()


def test_a_new_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(cli.app, "registered_commands", [*cli.app.registered_commands])

    def toy() -> int:
        """Print a word."""
        print("a toy")
        return 1

    cli.app.command(rich_help_panel="Look")(toy)
    assert cli.main(["toy"]) == cli.FAILED
    assert capsys.readouterr().out == "a toy\n"


def test_a_new_metric(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(metrics.TABLES, "train", {**metrics.TRAIN, "toys_N": "toys of each kind"})
    assert metrics.meaning_of("train/toys_3") == "toys of each kind"


def test_a_new_configuration_key() -> None:
    class Run(RunSection):
        toys: int = 0

    class WithToys(Config):
        run: Run = Run()

    text = least_config().model_dump_json().replace('"run":{', '"run":{"toys":3,')
    assert WithToys.model_validate_json(text).run.toys == 3
    with pytest.raises(ConfigError, match=r"run.toys = 3: unknown key"):
        least_config(run={"toys": 3})


def test_a_new_audit_check(monkeypatch: pytest.MonkeyPatch) -> None:
    facts: Any = MappingProxyType({"prompts": 2})
    toy = Check(
        name="toy", promise="no toys", counts="toys", examined=lambda facts: facts["prompts"],
        rule=lambda _: [Violation(text="a toy")],
    )  # fmt: skip
    monkeypatch.setattr(prompt_checks, "CHECKS", (*prompt_checks.CHECKS, toy))
    found = next(check for check in audit_checks.all_checks() if check.name == "toy")
    assert (found.examined(facts), [violation.text for violation in found.rule(facts)]) == (2, ["a toy"])
