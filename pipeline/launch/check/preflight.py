"""Everything that can fail later, tried before a run exists: `penstock check`, and before `create` and `run`.

The first problem is raised as one line with its fix; earlier findings have been reported.
"""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from typing import Any

import psutil

from penstock.infra.errors import PenstockError
from penstock.infra.paths import state_path
from penstock.infra.tensors.parameter_count import parameters
from penstock.pipeline.config.load import Config, ConfigError
from penstock.pipeline.inspect.records.runs import size
from penstock.pipeline.inspect.report.evaluations import one_line
from penstock.pipeline.inspect.report.formats import duration
from penstock.pipeline.launch.check import trial
from penstock.pipeline.launch.check.arithmetic import arithmetic
from penstock.pipeline.launch.check.disk import Growth, delta_share
from penstock.pipeline.launch.check.memory import Shape, adapter_bytes, estimates, offloaded, shape_of, time_shared
from penstock.pipeline.launch.check.reward_signal import equal_and_low, scale_of
from penstock.pipeline.launch.create import check_inputs
from penstock.pipeline.launch.placement import place, visible_gpus
from penstock.pipeline.rewards.functions import Score
from penstock.pipeline.runtime.factories import check_engine

SHOWN_GROUPS = 2
"""Groups of which a sample is shown."""
SHOWN = 400
"""Characters of a prompt or a completion."""

Tell = Callable[[str, str], None]


@dataclass(frozen=True, slots=True)
class Checked:
    """Findings: lines for the user by name, the run's info for `create`, and the generated samples."""

    lines: dict[str, str]
    info: Mapping[str, Any]
    samples: Sequence[Mapping[str, Any]] = field(default_factory=list)


def check(config: Config, *, tell: Tell, samples: bool, notify: Callable[[str], None] = lambda _: None) -> Checked:
    """Check everything; `tell` gets each finding as (name, text) at once; with `samples` the engine generates those of a step.

    Raises:
        ConfigError: a setting that this machine, the model or the data cannot do.
        PenstockError: data, model, reward, engine or disk cannot be used.
    """
    lines: dict[str, str] = {}

    def note(name: str, text: str) -> None:
        lines[name] = text
        tell(name, text)

    check_devices(config)
    if config.model_directory.is_dir():
        check_engine(config)
    try:
        info, kinds = check_inputs(config, notify=notify)
    except (PenstockError, ConfigError):
        # The numbers show what is requested even if a file is missing.
        rows = config.data.limit or config.data.size or (config.run.steps or 0) * config.schedule.prompts_per_step
        for name, text in arithmetic(config, rows=rows) if rows else ():
            note(name, text)
        raise
    for name, text in arithmetic(config, rows=info["rows"]):
        note(name, text)
    count = parameters(config.model_directory)
    note("model", config.model.path + (f", {count / 1e6:,.1f} million parameters" if count else ""))
    check_disk(config, info, note)
    note("memory", memory_line(config))
    scores = list[Score]()
    if config.environment.source is None:  # which alone knows what an episode is worth
        scores = trial.score_answers(config, kinds)
        note("reward", f"of the first {len(scores)} rows' own answers: {', '.join(map(_score, scores))}")
    generated = _samples(config, info, note, notify) if samples else []
    sampled = [sample["reward"] for sample in generated if sample["reward"] is not None]
    problem = equal_and_low(sampled, scale_of(config, [*sampled, *(reward for score in scores for reward in score.scored)]))
    if problem:
        note("warning", problem)
    return Checked(lines, info, generated)


def check_devices(config: Config) -> None:
    """Refuse GPUs that this machine does not have. Raises `ConfigError`."""
    gpus = visible_gpus()
    place(config, gpus)
    for section, device in (("trainer", config.trainer.device), ("rollout", config.rollout.device)):
        if device.startswith("cuda") and not gpus:
            raise ConfigError(f'{section}.device: {device!r}, but no GPU is visible here; set "auto" or "cpu"')


def check_disk(config: Config, info: Mapping[str, Any], note: Tell) -> None:
    """Compare what the run will write with what is free, where the log is on this machine. Raises `PenstockError`."""
    count = parameters(config.model_directory)
    if count is None:
        return
    chosen, steps, share = config.weights, info["steps"], delta_share(config.trainer.dtype, config.trainer.lr)
    of_model = partial(Growth, config=config, count=count, adapters=adapter_bytes(config, _shape(config)))
    likely, most = of_model(share=share), of_model(share=1.0)
    sent = (
        f"{size(likely.whole)} whole, every {chosen.anchor_every} versions; a delta about {size(likely.delta)} at trainer.lr = "
        f"{config.trainer.lr:g} in {config.trainer.dtype}"
        if likely.adapters is None
        else f"{size(likely.whole)} whole, once; the adapters of each version {size(likely.adapters)}"
    )
    note("weights", f'{sent}; weights.keep = "{chosen.keep}"')
    keeps = "" if config.kafka.keep_steps is None else f" (at most {size(likely.kept_samples(steps))} are retained)"
    home = next(parent for parent in (state_path(), *state_path().parents) if parent.exists())
    free = shutil.disk_usage(home).free
    full, earliest = likely.full_at(free, steps=steps), most.full_at(free, steps=steps)
    soon = f"; full after step {earliest} if every delta were whole" if earliest is not None and full is None else ""
    note(
        "disk",
        f"about {size(likely.weights(steps))} of weights (at most {size(most.weights(steps))}), {size(likely.samples)} of samples a step"
        f"{keeps}, {size(likely.checkpoints(steps))} of checkpoints, {size(likely.exported)} of the exported model; {size(free)} are free"
        f"{soon}",
    )
    if full is not None:
        chain = of_model(config=config.model_copy(update={"weights": chosen.model_copy(update={"keep": "chain"})}), share=share)
        less = f'set weights.keep = "chain" ({size(chain.here(steps))}), ' if chosen.keep == "all" and chain.here(steps) <= free else ""
        fewer = "set kafka.keep_steps, " if config.kafka.keep_steps is None and steps * likely.samples > free // 4 else ""
        raise PenstockError(
            f"the disk would be full after step {full} of {steps}: the run writes about {size(likely.here(steps))}, {size(free)} are free: "
            f'{less}{fewer}lower run.steps, raise schedule.steps_per_version, set trainer.dtype = "bfloat16", '
            "or set PENSTOCK_HOME to a larger disk"
        )


def memory_line(config: Config) -> str:
    """Expected peak memory of each worker, with a warning if the sum exceeds the free memory of this machine."""
    shape = _shape(config)
    if shape is None:
        return "not estimated: the model is no decoder with dense gated layers"
    workers, counts = estimates(config, shape), {"trainer": config.trainer.processes, "rollout": config.rollout.workers}
    parts = [f"{each.role} {size(each.total)}" + (f" x {count}" if (count := counts.get(each.role, 1)) > 1 else "") for each in workers]
    total, free = sum(each.total * counts.get(each.role, 1) for each in workers), psutil.virtual_memory().available
    if config.colocated and visible_gpus():
        gpu, host = time_shared(workers)
        turns = f"by turns the GPU holds {size(gpu)} at most and the host {size(host)}, {size(free)} are free"
        return f"about {', '.join(parts)} at the peak; {turns}"
    where = f"{size(free)} are free"
    if visible_gpus():
        host = offloaded(config, shape) * config.trainer.processes
        where = f"most of it on the GPUs{f', {size(host)} of the trainer in host memory, of which {where}' if host else ''}"
    return f"about {', '.join(parts)} at the peak, {size(total)} together; {where}"


def _shape(config: Config) -> Shape | None:
    return shape_of(json.loads((config.model_directory / "config.json").read_text(encoding="utf-8")))


def _samples(config: Config, info: Mapping[str, Any], note: Tell, notify: Callable[[str], None]) -> list[dict[str, Any]]:
    notify(f"loading the model into the {config.rollout.engine} engine, to generate the samples of a step, at most 64")
    environment = place(config, visible_gpus()).environment("rollout-0")
    trial_result = trial.generate(config, {"OMP_NUM_THREADS": str(config.rollout.threads), **environment})
    samples: list[dict[str, Any]] = trial_result["samples"]
    if cause := next((sample["cause"] for sample in samples if sample["cause"]), None):
        raise PenstockError(f"{config.environment.source}: {cause}")
    rows = trial.rows_of(config)
    groups = [[sample for sample in samples if sample["row"] == number] for number in range(len(rows))]
    texts, ids, played = ([[sample[name] for sample in group] for group in groups] for name in ("completion", "token_ids", "episode"))
    scores = trial.score(config, rows, texts, ids, [None if None in episodes else episodes for episodes in played])
    for group, row, score in zip(groups, rows, scores, strict=True):
        for sample, reward in zip(group, score.rewards, strict=False):  # a single sample was scored twice
            sample["reward"], sample["answer"] = reward, row.columns.get("answer")
    for number, group in enumerate(groups[:SHOWN_GROUPS], 1):
        note(f"sample {number}", _shown(group[0]))
    scored = [sample["reward"] for sample in samples if sample["reward"] is not None]
    span = f"{min(scored):g} to {max(scored):g}, mean {fmean(scored):.3g}" if scored else "none"
    note("rewards", f"of {len(samples)} samples of {len(rows)} prompts: {span}")
    tokens = sum(len(sample["token_ids"]) for sample in samples)
    trained = info["steps"] * config.schedule.prompts_per_step * config.schedule.samples_per_prompt
    generating_s = trained * trial_result["generate_s"] / len(samples) / config.rollout.workers
    took = f"{tokens} tokens in {trial_result['generate_s']:.1f} s, {len(samples)} samples concurrently"
    note("drawing", f"the model loaded in {trial_result['load_s']:.1f} s; {took}")
    note(
        "time",
        f"at most {duration(generating_s)} of generation for {trained:,} samples at that rate; training takes additional time or overlaps",
    )
    return samples


def _shown(sample: Mapping[str, Any]) -> str:
    prompt, completion = (one_line(sample[name], SHOWN) for name in ("prompt", "completion"))
    answer = "" if sample["answer"] is None else f"\n  answer      {one_line(str(sample['answer']), SHOWN)}"
    cut_off = ", cut off at sampling.max_new_tokens" if sample["finish"] == "length" else ""
    reward = "none" if sample["reward"] is None else f"{sample['reward']:g}"
    return f"reward {reward}, {len(sample['token_ids'])} tokens{cut_off}\n  prompt      {prompt}{answer}\n  completion  {completion}"


def _score(score: Score) -> str:
    return "none" if score.rewards[0] is None else f"{score.rewards[0]:g}"
