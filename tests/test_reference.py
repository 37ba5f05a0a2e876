"""The reference is generated from the code: its pages are current, and every key, column and option has a meaning."""

from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel

from docs.generate import PAGES, WRITTEN
from docs.site_only import cli, metric_names
from penstock.pipeline.config.run_config import Config
from penstock.pipeline.config.schema import ChildSection, PoolSection, SourceSampling
from penstock.pipeline.runtime.reporting.reporter import USES
from penstock.topics.metrics import meaning_of


@pytest.mark.parametrize("page", WRITTEN)
def test_a_generated_page_is_current(page: str) -> None:
    assert (PAGES / page).read_text(encoding="utf-8") == WRITTEN[page](), "rewrite it with: python docs/generate.py"


def keys() -> Iterator[tuple[str, Any]]:
    sections: dict[str, Any] = {name: field.annotation for name, field in Config.model_fields.items()}
    for name, section in {**sections, "data.sampling": SourceSampling, "rollout.pools": PoolSection}.items():
        assert issubclass(section, BaseModel)
        yield from ((f"{name}.{key}", field) for key, field in section.model_fields.items())


def test_every_key_of_the_configuration_has_a_meaning_and_a_row() -> None:
    page = (PAGES / "configuration.md").read_text(encoding="utf-8")
    assert [name for name, field in keys() if not field.description] == []
    assert page.count("\n|`") == len(list(keys())) - len(ChildSection.model_fields)  # [environment] refers to [reward] for these


def test_the_page_of_the_commands_has_every_command_and_a_meaning_for_every_option() -> None:
    page = cli()
    assert {"## penstock run CONFIG", "## penstock topics show RUN|DIR TOPIC PARTITION OFFSET", "## penstock runs"} <= set(
        page.splitlines()
    )
    assert "--trust-code" in page.partition("## penstock worker")[2].partition("## ")[0]
    assert [line for line in page.splitlines() if line.endswith("||")] == []


@pytest.mark.parametrize(
    ("point", "meaning"),
    [
        ("train/tokens_at_lag_3", "share of trained tokens whose lag is N versions"),
        ("train/queued_lag_p95", "lag of the groups that wait for a later step, in versions"),
        ("system/rollout-0/time_no_prompts_s", "seconds in one use; the uses add up to the time of the worker"),
        ("eval/pass_at_4", "probability that one of N samples is solved"),
        ("eval/gsm8k/greedy_accuracy", "the metric NAME over the held-out prompts of one source of several"),
        ("reward", "mean reward of all scored samples of a version, trained or not"),
        ("train/invented", None),
    ],
)
def test_a_metric_is_explained_by_its_full_name(point: str, meaning: str | None) -> None:
    assert meaning_of(point) == meaning


def test_every_use_of_time_has_a_meaning() -> None:
    table = metric_names().partition("## Uses of time")[2]
    assert [use for use in USES if f"`{use}`" not in table] == []
