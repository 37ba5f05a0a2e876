"""A user's own loss and advantage are tried before the run is created; several rewards can have an advantage each."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.infra.memory.log import MemoryLog
from penstock.pipeline.config.load import Config, ConfigError, from_json, from_table, to_json
from penstock.pipeline.launch.check import preflight
from penstock.pipeline.launch.create import check_user_functions, create
from penstock.pipeline.learner.micro_batches import advantage_function, combined_advantages
from penstock.topics.groups import Group
from tests.support.least_config import least_config
from tests.support.light_model import light_model
from tests.support.refusals import one_line
from tests.support.trainer_alone import group_of

pytest.importorskip("torch")

MINE = """
import numpy, torch

def plain(logprobs, batch, **_):
    mask = torch.as_tensor(batch.completion_mask)
    return -(torch.where(mask, logprobs, 0.0) * torch.as_tensor(batch.advantages)[:, None]).sum(), {}

def total(logprobs, batch, **_):
    return plain(logprobs, batch)[0]

def by_token(logprobs, batch, **_):
    return -logprobs, {}

def cut_off(logprobs, batch, **_):
    return plain(logprobs.detach(), batch)[0], {}

def everywhere(logprobs, batch, **_):
    return logprobs.sum(), {}

def not_finite(logprobs, batch, **_):
    return plain(logprobs, batch)[0] / 0.0, {}

def told_tensors(logprobs, batch, **_):
    return plain(logprobs, batch)[0], {"x_sum": logprobs.detach()}

def strict(logprobs, batch, *, clip):
    return plain(logprobs, batch)

def ranks(rewards):
    return numpy.argsort(numpy.argsort(rewards)) - (len(rewards) - 1) / 2

def mean(rewards):
    return float(numpy.mean(rewards))
"""


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(MINE, encoding="utf-8")
    return tmp_path / "mine.py"


def config_of(**algorithm: Any) -> Config:
    return least_config(algorithm=algorithm)


@pytest.mark.parametrize("settings", [{}, {"kl_coef": 0.1, "proximal": "behaviour"}])
def test_functions_that_work_pass_the_trial(mine: Path, settings: dict[str, Any]) -> None:
    check_user_functions(config_of(loss=f"{mine}:plain", aggregate="token_mean", advantage=f"{mine}:ranks", **settings))
    check_user_functions(config_of(loss="gspo", advantage="rloo"))


@pytest.mark.parametrize(
    ("algorithm", "said"),
    [
        ({"loss": "total"}, "algorithm.loss: .*:total returned a Tensor, expected \\(loss sum, statistics\\)"),
        ({"loss": "by_token"}, "returned a loss without a gradient: expected the sum over the trained tokens"),
        ({"loss": "cut_off"}, "returned a loss without a gradient"),
        ({"loss": "everywhere"}, "returned a loss with a gradient for prompt or padding tokens"),
        ({"loss": "not_finite"}, "missing or not finite"),
        ({"loss": "told_tensors"}, "expected a dict of name to number"),
        ({"loss": "strict"}, "raises an error on synthetic samples: TypeError: strict\\(\\) got an unexpected keyword argument"),
        ({"loss": "plian"}, "has no function 'plian'; did you mean 'plain'"),
        ({"advantage": "ranks?by=2"}, "algorithm.advantage: .*unexpected keyword argument 'by'"),
        ({"advantage": "mean"}, "algorithm.advantage: .*:mean returned 0.5 for 8 rewards, expected 8 finite numbers"),
    ],
)
def test_what_would_stop_the_first_step_is_one_line_before_the_run_is_created(mine: Path, algorithm: dict[str, str], said: str) -> None:
    named = {key: f"{mine}:{name}" for key, name in algorithm.items()}
    with one_line(ConfigError, match=said):
        check_user_functions(config_of(aggregate="token_mean", **named))


@pytest.mark.parametrize(
    ("algorithm", "said"),
    [
        ({"loss": "not_finite", "aggregate": "token_mean"}, "algorithm.loss: .*:not_finite returned the loss .* missing or not finite"),
        ({"loss": "strict", "aggregate": "token_mean"}, "algorithm.loss: .*:strict raises an error on synthetic samples: TypeError: "),
        ({"advantage": "mean"}, "algorithm.advantage: .*:mean returned 0.5 for 8 rewards, expected 8 finite numbers"),
    ],
)
def test_a_run_with_a_broken_function_is_neither_created_nor_passes_the_check(
    mine: Path, tmp_path: Path, algorithm: dict[str, str], said: str
) -> None:
    def config(named: dict[str, str]) -> Config:
        own = {key: f"{mine}:{name}" if key in ("loss", "advantage") else name for key, name in named.items()}
        data = {"source": str(tmp_path / "rows.jsonl"), "max_prompt_tokens": 64}
        sections = {"run": {"steps": 1}, "model": {"path": str(tmp_path / "model")}, "sampling": {"max_new_tokens": 16}}
        return from_table({**sections, "data": data, "algorithm": own})

    light_model(tmp_path / "model", context=512)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n', encoding="utf-8")
    log, broken = MemoryLog(), config(algorithm)
    with one_line(ConfigError, match=said):
        create(broken, log=log, run_id="broken", notify=lambda _: None)
    assert log.topics("") == []
    with pytest.raises(ConfigError, match=said):
        preflight.check(broken, tell=lambda *_: None, samples=False)
    sound = {"loss": "plain", "aggregate": "token_mean", "advantage": "ranks"}
    assert create(config(sound), log=log, run_id="sound", notify=lambda _: None).status == "created"


def test_an_advantage_that_does_not_fit_the_size_of_a_group_is_told_before_the_run_is_created() -> None:
    with pytest.raises(ConfigError, match=r"algorithm.advantage: pass_at_k\?k=8 .*k = 8 must be between 1 and 7"):
        check_user_functions(config_of(advantage="pass_at_k?k=8"))
    check_user_functions(config_of(advantage="pass_at_k?k=2"))


def test_groups_of_one_sample_need_an_advantage_that_is_not_relative_to_the_group(mine: Path) -> None:
    alone = {"samples_per_prompt": 1}
    check_user_functions(least_config(schedule=alone, algorithm={"advantage": f"{mine}:ranks"}))
    with pytest.raises(ConfigError, match="1 leaves every group advantage at zero; use at least 2, or a custom "):
        least_config(schedule=alone)


def test_an_own_loss_has_to_say_what_it_is_divided_by_unless_an_older_record_does_not(mine: Path) -> None:
    with pytest.raises(ConfigError, match=r"algorithm.aggregate: a custom loss needs it, .*'token_mean' by the step's trained tokens"):
        config_of(loss=f"{mine}:plain")
    text = to_json(config_of(loss=f"{mine}:plain", aggregate="token_mean"))
    older = from_json(text.replace('"defaults":2,', "").replace('"aggregate":"token_mean"', '"aggregate":null'))
    assert older.aggregate == "sequence_mean"


# ---- several rewards


def with_components(*rows: tuple[float | None, ...], weights: tuple[float, ...]) -> Group:
    group = group_of(0, version=0)
    samples = [replace(group.samples[0], components=row, reward=sum(w * c for w, c in zip(weights, row, strict=True) if c)) for row in rows]
    return replace(group, samples=tuple(samples), reward_weights=weights)


def test_each_of_several_rewards_can_have_an_advantage_of_its_own() -> None:
    # As sums the last three are equal; as components each of them is told apart.
    group = with_components((1.0, 10.0), (0.0, 0.0), (1.0, None), (0.0, None), weights=(1.0, 0.5))
    function = advantage_function("dr_grpo", trust_code=False)
    assert combined_advantages(function, combine="rewards")(group).tolist() == [6 - 1.75, -1.75, 1 - 1.75, -1.75]
    found = combined_advantages(function, combine="advantages")(group)
    assert found.tolist() == [0.5 + 0.5 * 5.0, -0.5 - 0.5 * 5.0, 0.5, -0.5]
    assert found.dtype == np.float32


def test_a_penalty_on_the_sum_is_refused_where_the_sum_is_not_used() -> None:
    with pytest.raises(ConfigError, match=r"algorithm.truncated: 'penalise' changes the sum .* add 'soft_overlong' to reward.functions"):
        config_of(combine="advantages", truncated="penalise")
