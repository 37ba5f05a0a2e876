"""What a wrong key is answered with: ours of the same meaning, one spelt like it, or nothing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.pipeline.config import fields
from penstock.pipeline.config.load import SHOWN_MISTAKES, ConfigError, from_table
from penstock.pipeline.config.run_config import Config

LEAST = {"model": {"path": "m"}, "data": {"source": "d.jsonl"}, "run": {"steps": 1}}


def answer(section: str, key: str, value: object) -> str:
    with pytest.raises(ConfigError) as refused:
        from_table({**LEAST, section: {**LEAST.get(section, {}), key: value}})
    return str(refused.value)


@pytest.mark.parametrize("ours", sorted({ours for ours in fields.FOREIGN_KEYS.values() if ours}))
def test_every_key_that_a_synonym_leads_to_exists(ours: str) -> None:
    section, key = ours.split(".")[:2]
    assert key in Config.model_fields[section].annotation.model_fields


@pytest.mark.parametrize(
    ("section", "key", "hint"),
    [
        ("trainer", "learning_rate", "did you mean 'trainer.lr'?"),
        ("algorithm", "beta", "did you mean 'algorithm.kl_coef'?"),
        ("model", "name", "did you mean 'model.path'?"),
        ("run", "num_generations", "did you mean 'schedule.samples_per_prompt'?"),
        ("trainer", "gpu", "did you mean 'trainer.gpus'?"),
        ("rollout", "temperature", "did you mean 'sampling.temperature'?"),
        ("trainer", "use_peft", "did you mean 'trainer.lora_rank'?"),
        ("trainer", "report_to", "did you mean 'wandb.enabled'?"),
        ("rollout", "tensor_parallel", "did you mean 'rollout.vllm.tensor_parallel_size'?"),
        ("run", "push_to_hub", "no such key, see docs/reference/configuration.md"),
        ("algorithm", "foo", "unknown key; see docs/reference/configuration.md"),
    ],
)
def test_an_unknown_key_is_answered_by_its_meaning_before_its_spelling(section: str, key: str, hint: str) -> None:
    assert answer(section, key, 1).endswith(hint)


def test_an_unknown_value_is_answered_by_its_meaning() -> None:
    assert answer("schedule", "mode", "async").endswith("did you mean 'in_flight'?")


@given(
    st.lists(
        st.sampled_from(["trainer.learning_rate", "trainer.foo", "run.seed", "reward.functions", "data.limit", "model.name", "eval.x"])
    )
)
def test_all_mistakes_are_told_at_once_each_key_once(wrong: list[str]) -> None:
    table: dict[str, dict[str, object]] = {name: dict(section) for name, section in LEAST.items()}
    for key in wrong:
        section, _, name = key.partition(".")
        table.setdefault(section, {})[name] = "x"
    if not wrong:
        return
    with pytest.raises(ConfigError) as refused:
        from_table(table)
    told = str(refused.value).split(" | ")
    shown = {part.partition(" ")[0] for part in told if not part.startswith("and ")}
    assert shown <= set(wrong) and len(shown) == min(SHOWN_MISTAKES, len(set(wrong)))
    assert (told[-1] == f"and {len(set(wrong)) - SHOWN_MISTAKES} more") == (len(set(wrong)) > SHOWN_MISTAKES)


def test_a_list_and_a_section_are_asked_for_in_the_words_of_toml() -> None:
    line = "reward.functions = 'rew.py:f': a list is expected; write reward.functions = [\"rew.py:f\"]"
    assert answer("reward", "functions", "rew.py:f") == line
    with pytest.raises(ConfigError, match=r"model = 'x': model is a section; write \[model\] with its keys below it"):
        from_table({**LEAST, "model": "x"})
