"""The register of runs: creating one checks everything a person can get wrong before a worker starts.

The rule: the configuration travels in the log; whoever knows a broker and a run id knows the whole run.
"""

import json
import os
import re
import secrets
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.infra.errors import PenstockError
from penstock.infra.log import Log
from penstock.pipeline.config.load import Config, ConfigError, to_json
from penstock.pipeline.config.plugins import nearest, source_digest
from penstock.pipeline.envs import rewards
from penstock.pipeline.envs.datasets import check, open_dataset
from penstock.pipeline.envs.tokenization import Renderer, digests
from penstock.pipeline.launch.gpu_placement import place, visible_gpus
from penstock.pipeline.scheduling.schedule import versions_of
from penstock.topics import runs as topic
from penstock.topics.catalogue import RUNS_SPEC, RUNS_TOPIC, check_run_id, topics_of
from penstock.topics.runs import RunRecord
from penstock.topics.wire.errors import Unusable
from penstock.topics.wire.record import Outgoing

READ_LIMIT_S = 60.0


def create(
    config: Config,
    *,
    log: Log,
    run_id: str | None = None,
    say: Callable[[str], None] = print,
    about: Mapping[str, Any] | None = None,
) -> RunRecord:
    """Check the data and the model, register the run and make its topics; starts nothing. `about` joins what is said of the run.

    Raises:
        ConfigError: the id is taken or malformed, or sizes do not fit the model's context.
        PenstockError: data or model cannot be used; one line, for data with file and line.
    """
    info = {**inspect(config, say=say), **(about or {})}
    run = _usable(run_id or new_id(config))
    log.create_topics({RUNS_TOPIC: RUNS_SPEC}, replication_factor=config.kafka.replication_factor)
    if find(log, run) is not None:
        raise ConfigError(f"run {run!r} exists already; choose another --run-id, or resume it")
    log.create_topics(topics_of(run, partitions=config.partitions), replication_factor=config.kafka.replication_factor)
    now = time.time_ns()
    record = RunRecord(run=run, status="created", config=to_json(config), info=json.dumps(info), created_ns=now, updated_ns=now)
    write(log, record)
    return record


def new_id(config: Config) -> str:
    """An id that no run has yet."""
    return f"{_slug(config.run.name)}-{time.strftime('%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def inspect(config: Config, *, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Everything about the run that is fixed by its data and model: rows, steps, digests. Raises as `create`."""
    data, model = config.data, Path(config.model.path)
    try:
        found = digests(model, chat_template=data.chat_template)
        context = json.loads((model / "config.json").read_text(encoding="utf-8")).get("max_position_embeddings")
        say(f"checking the prompts of {data.source}")
        renderer = Renderer(model, chat_template=data.chat_template, max_prompt_tokens=data.max_prompt_tokens)
        dataset = open_data(config)
        check(dataset, also=renderer.render)
        scoring = rewards.resolve(config.reward.functions, config.reward.weights)
        scoring.check(dataset[0].columns)
        if config.eval.source is not None:
            held_out = open_eval_data(config)
            check(held_out, also=renderer.render)
            scoring.check(held_out[0].columns)
        for function in (config.algorithm.loss, config.advantage):
            if ":" in function:
                source_digest(function)
    except (ValueError, OSError) as error:
        raise PenstockError(str(error)) from error
    rows, steps = len(dataset), config.steps(len(dataset))
    longest = data.max_prompt_tokens + config.sampling.max_new_tokens
    if context is not None and config.sampling.max_new_tokens >= context:
        raise ConfigError(f"sampling.max_new_tokens = {config.sampling.max_new_tokens}: the model's context is {context} tokens")
    if context is not None and longest > context:
        raise ConfigError(
            f"data.max_prompt_tokens = {data.max_prompt_tokens} and sampling.max_new_tokens = {config.sampling.max_new_tokens}: "
            f"together above the model's context of {context} tokens"
        )
    install = {"install_s": float(os.environ["PENSTOCK_INSTALL_S"])} if os.environ.get("PENSTOCK_INSTALL_S") else {}
    return {
        **install,
        "rows": rows,
        "steps": steps,
        "versions": versions_of(steps, steps_per_version=config.schedule.steps_per_version),
        "digests": found,
        "git": git_revision(),
    }


def open_data(config: Config) -> Any:
    """The training prompts as the configuration names them."""
    data = config.data
    return open_dataset(
        data.source,
        prompt_field=data.prompt_field,
        answer_field=data.answer_field,
        split=data.split,
        start=data.start,
        limit=data.limit,
        size=data.size,
        seed=config.run.seed,
    )


def open_eval_data(config: Config) -> Any:
    """The held-out prompts; made with another seed where the source generates them."""
    held = config.eval
    assert held.source is not None
    return open_dataset(
        held.source,
        prompt_field=config.data.prompt_field,
        answer_field=config.data.answer_field,
        split=held.split,
        start=held.start,
        limit=held.limit,
        size=held.size,
        seed=config.run.seed,
    )


def rows_of(config: Config) -> int:
    """Rows of the training data. Raises `PenstockError` when it cannot be opened."""
    try:
        return len(open_data(config))
    except (ValueError, OSError) as error:
        raise PenstockError(str(error)) from error


def arithmetic(config: Config, *, rows: int) -> list[tuple[str, str]]:
    """The numbers that follow from the configuration, as (name, value) for a person."""
    rules, steps = config.rules, config.steps(rows)
    groups = steps * rules.prompts_per_step
    samples = groups * rules.samples_per_prompt
    a_step = rules.prompts_per_step * rules.samples_per_prompt
    clip = f"-{config.clip_low}/+{config.clip_high}"
    return [
        (
            "schedule",
            f"{rules.mode}, order {rules.order}, max_lag {rules.max_lag} version(s) = {rules.max_lag * rules.steps_per_version} step(s)",
        ),
        ("one step", f"{rules.prompts_per_step} groups x {rules.samples_per_prompt} samples = {a_step} samples"),
        ("one round (between two published weights)", f"{rules.steps_per_version} step(s) = {rules.round_groups} groups"),
        ("the run", f"{steps} steps, {versions_of(steps, steps_per_version=rules.steps_per_version)} versions after the initial one"),
        ("trained in all", f"{groups} groups, {samples} samples, at most {samples * config.sampling.max_new_tokens} tokens"),
        ("data", f"{rows} rows, {groups / rows:.2f} epochs without replacements for dropped groups"),
        ("admitted ahead of the newest weights", f"at most {rules.round_groups * (1 + rules.max_lag)} groups"),
        ("kafka", f"{config.partitions} partitions, broker {config.kafka.bootstrap}"),
        (
            "workers",
            f"{config.rollout.workers} rollout, {config.scorer.workers} scorer, 1 feeder, 1 trainer ({config.trainer.backend}), 1 tracker"
            + (", 1 evaluator" if config.eval.source else ""),
        ),
        ("gpus", _gpus(config)),
        (
            "loss",
            f"{config.algorithm.loss}: advantage {config.advantage}, {config.aggregate}, clip {clip}, "
            f"proximal {config.proximal}, correction {config.correction}, kl_coef {config.algorithm.kl_coef}",
        ),
    ]


def _gpus(config: Config) -> str:
    try:
        return str(place(config, visible_gpus()))
    except ConfigError as error:  # a look at a configuration that is meant for another machine is no mistake
        return f"not on this machine: {error}"


def write(log: Log, record: RunRecord) -> None:
    """Append a run's newest state to the register."""
    producer = log.producer()
    try:
        value = topic.encode(record)
        headers = topic.headers(record).encode(value)
        producer.send(Outgoing(topic=RUNS_TOPIC, partition=0, key=record.run.encode(), headers=headers, value=value)).offset(READ_LIMIT_S)
    finally:
        producer.close()


def mark(log: Log, record: RunRecord, *, status: topic.Status) -> RunRecord:
    """The same run with another status, written to the register."""
    changed = replace(record, status=status, updated_ns=time.time_ns())
    write(log, changed)
    return changed


def all_runs(log: Log) -> list[RunRecord]:
    """Every registered run, oldest first; records nobody can use are passed over."""
    if log.partitions(RUNS_TOPIC) is None:
        return []
    tail = log.tail({(RUNS_TOPIC, 0): "earliest"})
    found: dict[str, RunRecord] = {}
    try:
        for record in tail.read_to_end(READ_LIMIT_S):
            key = (record.key or b"").decode("ascii", "replace")
            if not record.value:  # the run was deleted
                found.pop(key, None)
                continue
            try:
                state = topic.read(record, run=key)[1]
            except Unusable:
                continue
            if key not in found or state.updated_ns >= found[key].updated_ns:
                found[key] = state
    finally:
        tail.close()
    return sorted(found.values(), key=lambda run: run.created_ns)


def find(log: Log, run: str) -> RunRecord | None:
    """The newest state of one run, or None when it is not registered."""
    return next((record for record in all_runs(log) if record.run == run), None)


def resolve(log: Log, text: str) -> str:
    """A run id from an id, a unique prefix, or `latest`. Raises `ConfigError`."""
    runs = all_runs(log)
    names = [record.run for record in runs]
    if not names:
        raise ConfigError("no run is registered on this broker; start one with `penstock run CONFIG`")
    if text == "latest":
        return names[-1]
    if text in names:
        return text
    matches = [name for name in names if name.startswith(text)]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise ConfigError(f"run {text!r} is ambiguous: {', '.join(matches[:5])}")
    raise ConfigError(f"no run {text!r} on this broker{nearest(text, names)}; see `penstock runs`")


def git_revision() -> str | None:
    """The revision of the working directory's git checkout, marked when it has changes; None outside of one."""
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"], capture_output=True, text=True, timeout=5, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None


def _usable(run: str) -> str:
    try:
        return check_run_id(run)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:32] or "run"
