"""Compares a run's record with the data, code and configuration of now: of a resumed run, and of one that is to be created again.

Other rows are refused unless the configuration accepts them, since a prompt's row number would mean two things; other code is
allowed, since it is how a mistake is corrected. Both are printed once and recorded; report and audit list them.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from penstock.infra.errors import ConfigError, PenstockError
from penstock.pipeline.config.fields import pinned
from penstock.pipeline.config.load import Config, from_json, to_json, with_values
from penstock.pipeline.config.plugins import source_digest, split_options
from penstock.pipeline.config.resume import CHANGEABLE
from penstock.pipeline.data.read_files import Dataset
from penstock.pipeline.data.run_data import described, open_data, open_eval_data, refuse_changed
from penstock.pipeline.data.tokenization import digests
from penstock.pipeline.inspect.metrics import flatten
from penstock.pipeline.rewards import functions as rewards
from penstock.topics.runs import RunRecord


def code_digests(config: Config) -> dict[str, str]:
    """SHA-256 of the source of each user function, by key and name: environment, loss, advantage, and reward functions of evaluation."""
    algorithm = config.algorithm
    own = {"environment.source": config.environment.source, "algorithm.loss": algorithm.loss, "algorithm.advantage": algorithm.advantage}
    plain = {key: split_options(name)[0] for key, name in own.items() if name}
    digests = {f"{key} {name}": source_digest(name) for key, name in plain.items() if name.partition(":")[0].endswith(".py")}
    return digests | {f"eval reward {name}": digest for name, digest in rewards.digests(config.eval.functions or ()).items()}


def with_changes(record: RunRecord, config: Config, *, notify: Callable[[str], None]) -> RunRecord:
    """The record of a resumed run with what has changed since it was written; each change is logged.

    Raises `ConfigError`: other rows, which `data.on_change` does not accept, or none. Raises `PenstockError`: the data cannot be opened.
    """
    info = json.loads(record.info)
    data, held_out = _opened(config)
    if config.data.on_change == "refuse":
        refuse_changed(info, config.data_sources, data, context="training", run=record.run)
        refuse_changed(info, config.eval_sources, held_out, context="evaluation", run=record.run)
    now = digests_of(config, data, held_out)
    changes = _changes(info, now)
    if not changes:
        return record
    for change in changes:
        notify(f"{change['what']} changed since the run started ({change['before'][:12]} -> {change['after'][:12]}): the report records it")
    info |= {**now, "rows": sum(map(len, data.values())), "changes": [*info.get("changes", ()), *changes]}
    return replace(record, info=json.dumps(info))


def require_same(record: RunRecord, config: Config, *, notify: Callable[[str], None]) -> None:
    """Compare a run with the configuration from which it would now be created; changes nothing.

    Keys that a resumed run may change keep the run's values, and `notify` gets them; the address of the broker is not compared. Raises
    `ConfigError`: another key, data set, code or tokenizer; one line names all of them. Raises `PenstockError`: the data cannot be opened.
    """
    recorded, info = from_json(record.config), json.loads(record.info)
    config = with_values(config, "model", path=pinned(config.model.path))
    before, after = (flatten(json.loads(to_json(each))) for each in (recorded, config))
    keys = [key for key in sorted(before.keys() | after.keys()) if before.get(key) != after.get(key) and key != "kafka.bootstrap"]
    texts = {key: f"{key} = {before.get(key)} (here {after.get(key)})" for key in keys}
    if left := [text for key, text in texts.items() if _may_change(key)]:
        notify(f"run {record.run} keeps its {', '.join(left)}; to change a key: penstock run --resume {record.run} --set KEY=VALUE")
    other = [text for key, text in texts.items() if not _may_change(key)]
    if not other:  # otherwise the data sets are others, too
        other = [change["what"] for change in _changes(info, digests_of(config, *_opened(config)))]
        if dict(digests(config.model_directory, chat_template=config.data.chat_template)) != info["digests"]:
            other.append("tokenizer, chat template or stop ids of model.path")
    if other:
        raise ConfigError(f"run {record.run!r} already exists with other values: {', '.join(other)}; use another --run-id, or its values")


def _may_change(key: str) -> bool:
    return any(key == changeable or key.startswith(f"{changeable}.") for changeable in CHANGEABLE)


def _opened(config: Config) -> tuple[Mapping[str, Dataset], Mapping[str, Dataset]]:
    """The data sets of training and of evaluation by source. Raises `ConfigError`, `PenstockError`."""
    try:
        return open_data(config).sources, open_eval_data(config)
    except ConfigError:
        raise
    except (ValueError, OSError) as error:
        raise PenstockError(str(error)) from error


def digests_of(config: Config, data: Mapping[str, Dataset], held_out: Mapping[str, Dataset]) -> dict[str, Any]:
    """The part of a run's info with the digests of its rows, reward functions and other code."""
    return {
        "data": [
            *described(config.data_sources, data, context="training"),
            *described(config.eval_sources, held_out, context="evaluation"),
        ],
        "reward_sources": rewards.digests(config.reward.functions),
        "code": code_digests(config),
    }


def _changes(recorded: Mapping[str, Any], now: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The digests that differ between a run's info and `digests_of` now, as the info records them; names only one has are left out."""
    before, after = _named(recorded), _named(now)
    moment = time.time_ns()
    return [
        {"what": what, "before": before[what], "after": digest, "time_ns": moment}
        for what, digest in after.items()
        if before.get(what, digest) != digest
    ]


def _named(info: Mapping[str, Any]) -> dict[str, str]:
    """Name of each data source, reward function and other code in a run's info -> its digest."""
    rows: Sequence[Mapping[str, Any]] = info.get("data", ())
    return {
        **{f"{'data' if row['context'] == 'training' else 'eval'}.source {row['source']}": row["digest"] for row in rows},
        **{f"reward {name}": digest for name, digest in info.get("reward_sources", {}).items()},
        **info.get("code", {}),
    }
