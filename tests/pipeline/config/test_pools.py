"""Pools in a configuration: what each has of the partitions, which rows are its own, and mistakes in one line."""

from typing import Any

import pytest

from penstock.pipeline.config.load import ConfigError
from penstock.pipeline.config.run_config import Config
from penstock.pipeline.data.read_files import DataError, Fields, make_row
from penstock.pipeline.data.run_data import pool_of
from penstock.pipeline.runtime.session import pool_of_worker
from tests.support.least_config import least_config

POOLS: dict[str, Any] = {"big": {"workers": 2, "tags": ["long", 'x"y'], "fallback": ["small"]}, "small": {}}


def config_with(pools: dict[str, Any] = POOLS, *, tag_field: str | None = "tag", **rollout: Any) -> Config:
    data = {} if tag_field is None else {"tag_field": tag_field}
    return least_config(data=data, kafka={"partitions": 12}, rollout={"workers": 3, "pools": pools, **rollout})


def test_a_pool_has_a_share_of_the_partitions_as_of_the_workers_with_its_fallbacks_behind() -> None:
    config = config_with()
    assert config.pools == ("big", "big", "small")
    assert config.pools_by_partition == (("big", "small"),) * 8 + (("small",),) * 4


def test_a_row_belongs_to_the_pool_of_its_tag_or_to_the_one_without_tags() -> None:
    def row(**columns: Any) -> Any:
        return make_row({"prompt": "p", **columns}, index=0, origin="d.jsonl:1", fields=Fields(answer=""))

    assert [pool_of(row(tag=tag), config_with()) for tag in ("long", 'x"y', "other", 7, None)] == ["big", "big", "small", "small", "small"]
    assert pool_of(row(), config_with({}, tag_field=None)) is None
    with pytest.raises(DataError, match=r"^d.jsonl:1: no field 'tag'; data.tag_field requires it to select a pool"):
        pool_of(row(), config_with())
    strict = config_with({"big": POOLS["big"], "small": {"tags": ["short"]}})
    with pytest.raises(DataError, match=r"^d.jsonl:1: no pool in rollout.pools \(big, small\) accepts tag = 'other'"):
        pool_of(row(tag="other"), strict)


def test_a_worker_is_in_the_pool_of_its_number_or_in_the_one_it_asks_for() -> None:
    config = config_with()
    assert [pool_of_worker(config, role="rollout", worker=f"rollout-{n}", requested=None) for n in range(3)] == ["big", "big", "small"]
    assert pool_of_worker(config, role="rollout", worker="rollout-host-12ab", requested="small") == "small"
    assert pool_of_worker(config, role="scorer", worker="scorer-0", requested=None) is None
    for asked, worker in ((None, "rollout-3"), (None, "rollout-host-12ab"), ("huge", "rollout-0")):
        with pytest.raises(ConfigError, match=r"^--pool: .*name the pool of rollout workers that this worker joins: big, small"):
            pool_of_worker(config, role="rollout", worker=worker, requested=asked)
    with pytest.raises(ConfigError, match=r"^--pool big: only rollout workers of a run with rollout.pools belong to a pool"):
        pool_of_worker(config_with({}, tag_field=None), role="rollout", worker="rollout-0", requested="big")


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"tag_field": None}, "rollout.pools: set data.tag_field"),
        ({"pools": {}}, "data.tag_field: the key selects a pool"),
        ({"workers": 2}, "rollout.workers: 2, but rollout.pools have 3 workers in all"),
        ({"pools": {"a": {"tags": ["x"]}, "b": {"tags": ["x"], "workers": 2}}}, "two pools have the tag 'x'"),
        ({"pools": {"a": {}, "b": {"workers": 2}}}, "two pools have no tags"),
        ({"pools": {"a": {"fallback": ["c"]}, "b": {"tags": ["x"], "workers": 2}}}, "rollout.pools.a.fallback: 'c' is not another pool"),
        ({"pools": {"a": {"fallback": ["a"], "workers": 3}}}, "rollout.pools.a.fallback: 'a' is not another pool"),
    ],
)
def test_a_mistake_is_one_line(changes: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        config_with(**changes)
