"""Reward of each built-in loss and advantage on the task of `make demo`, over several seeds.

    python -m benchmarks learning_curves --into curves
    python -m benchmarks learning_curves --into curves --only loss=gspo advantage=rloo --seeds 1
    python -m benchmarks learning_curves --into curves --table

A run is one process with the engine, rewards, filter, loss and optimizer of a run, without workers and topics, so that it takes seconds.
A step trains samples of the previous version, and a version has `--set schedule.steps_per_version=S` steps: 4 by default, so that samples
are up to seven steps old, and ratios, clip ranges and weights all act. A finished run is a file in the folder and is not run again, so
that several processes can share the work; `--table` only prints the table. Losses run with their own defaults, advantages under `grpo`;
everything else is `examples/demo.toml`.
"""

import json
import re
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.support.command import ROOT, parser_of, with_settings
from penstock.infra.engines.base import Completion, Engine, GroupRequest, Sampling
from penstock.pipeline.algorithms.registry import ADVANTAGES, LOSSES
from penstock.pipeline.config.load import load
from penstock.pipeline.config.run_config import Config
from penstock.pipeline.data.run_data import open_data, open_eval_data
from penstock.pipeline.data.tokenization import Decoder, Renderer, digests
from penstock.pipeline.inspect.report.formats import sparkline
from penstock.pipeline.learner.policy_trainer import PolicyTrainer
from penstock.pipeline.rewards.functions import resolve
from penstock.pipeline.rewards.scoring import group_of, scored_group
from penstock.pipeline.runtime.factories import make_engine
from penstock.pipeline.runtime.sampling import request_of, rollout_of
from penstock.pipeline.scheduling import rules
from penstock.topics.groups import Group
from penstock.topics.prompts import Prompt

DEMO = ROOT / "examples" / "demo.toml"
IN_ONE_PROCESS = ["rollout.engine=transformers", "schedule.mode=one_step_off", "schedule.steps_per_version=4"]
BASE = "loss=grpo"
WORSE = 0.05
"""A mean reward that is further below GRPO's is marked."""

Runs = Mapping[str, Sequence[Mapping[str, Any]]]
"""Variant -> its finished runs."""


def variants() -> dict[str, list[str]]:
    """Every built-in loss, and every other built-in advantage under GRPO's loss, with its settings."""
    losses = {f"loss={name}": [f"algorithm.loss={name}"] for name in LOSSES}
    others = [name for name in ADVANTAGES if name != LOSSES["grpo"].advantage]
    return losses | {f"advantage={name}": ["algorithm.loss=grpo", f"algorithm.advantage={name}"] for name in others}


def configuration(directory: Path, settings: Sequence[str]) -> Config:
    """The demo in one process, without its own choice of loss and correction, and with these settings."""
    lines = [line for line in DEMO.read_text(encoding="utf-8").splitlines() if not re.match(r"(loss|correction)\s*=", line)]
    file = directory / "demo.toml"
    file.write_text("\n".join(lines).replace('"../', f'"{ROOT}/'), encoding="utf-8")
    return load(file, [*IN_ONE_PROCESS, *settings])


class Groups:
    """Generates and scores the groups of a run, one after the other."""

    def __init__(self, config: Config, engine: Engine) -> None:
        self.config, self.engine = config, engine
        self._data, self._renderer, self._decoder = open_data(config), Renderer.of(config), Decoder(config.model.path)
        self._order, reward = self._data.order(config), config.reward
        self._rewards = resolve(reward.functions, reward.weights, max_completion_length=config.sampling.max_new_tokens)
        self._stop_ids = tuple(digests(config.model.path, chat_template=config.data.chat_template)["stop_ids"])
        self._groups = 0

    def next_prompt(self) -> Prompt:
        """The next prompt in the run's order."""
        number, turn = self._groups, self._order.at(self._groups)
        self._groups += 1
        row = self._data.row(turn.source, turn.row)
        text, token_ids = self._renderer.render(row)
        return Prompt(
            group=number, slot=number, min_version=0, samples_per_prompt=self.config.schedule.samples_per_prompt, epoch=turn.epoch,
            row=row.index, prompt=text, messages=None, token_ids=token_ids, columns=json.dumps(row.columns), created_ns=0,
        )  # fmt: skip

    def request(self, prompt: Prompt) -> GroupRequest:
        """Generation request of a prompt."""
        return request_of(prompt, range(prompt.samples_per_prompt), config=self.config, stop_ids=self._stop_ids)

    def group(self, prompt: Prompt, completions: Sequence[Completion]) -> Group:
        """A prompt's group with its rewards and its outcome."""
        ordered = sorted(completions, key=lambda completion: completion.sample)
        samples = [rollout_of(each, sampling=self.config.sampling, worker="one process") for each in ordered]
        texts = [self._decoder.decode(sample.token_ids) for sample in samples]
        row = {"prompt": prompt.prompt, "messages": None, "columns": json.loads(prompt.columns)}
        score = self._rewards.score(texts, **row, completion_ids=[sample.token_ids.tolist() for sample in samples])
        group = group_of(prompt, "scored", reason=None, reward=self.config.reward, scored_ns=0)
        return scored_group(group, samples, texts, score, algorithm=self.config.algorithm)

    def next(self) -> Group:
        """The next prompt's group with its outcome, under the engine's weights."""
        prompt = self.next_prompt()
        return self.group(prompt, completed(self.engine, self.request(prompt)))

    def greedy_accuracy(self) -> float:
        """The mean reward of greedy completions of the held-out prompts."""
        how = Sampling(greedy=True, max_new_tokens=self.config.sampling.max_new_tokens, stop_ids=self._stop_ids)
        rewards: list[float] = []
        for held_out in open_eval_data(self.config).values():
            for index in range(len(held_out)):
                row = held_out[index]
                text, ids = self._renderer.render(row)
                request = GroupRequest(group=index, prompt_ids=ids, samples=(0,), rows=1, seed=0, sampling=how)
                completion = self._decoder.decode(completed(self.engine, request)[0].token_ids)
                rewards += self._rewards.score([completion], prompt=text, messages=None, columns=row.columns).rewards
        return statistics.fmean(rewards)


def completed(engine: Engine, request: GroupRequest) -> list[Completion]:
    """The completions of one group, by number."""
    engine.submit(request)
    completions = []
    while not engine.idle:
        completions += engine.step()
    return sorted(completions, key=lambda completion: completion.sample)


def steps(config: Config, policy: PolicyTrainer, groups: Groups) -> Iterator[tuple[float, float]]:
    """Train; yields the mean reward of all samples generated for each step, before the filter, and the step's ESS."""
    schedule, published = config.rules, [policy.weights().tensors]
    for number in range(policy.steps):
        version = rules.version_after(number, steps_per_version=schedule.steps_per_version)
        under = max(0, version - schedule.max_lag)
        if groups.engine.version != under:
            groups.engine.load_weights(under, published[under])
        step, rewards, trained = policy.step(), list[float](), 0
        while trained < schedule.prompts_per_step:
            group = groups.next()
            rewards += group.rewards
            if group.outcome == "scored":
                step.add(group)
                trained += 1
        outcome = step.finish(learner_version=version)
        policy.steps_done += 1
        if rules.publishes(number, steps=policy.steps, steps_per_version=schedule.steps_per_version):
            published.append(policy.weights().tensors)
        yield statistics.fmean(rewards), outcome.metrics["ess"]
    groups.engine.load_weights(len(published) - 1, published[-1])


def run(name: str, settings: Sequence[str], *, seed: int) -> dict[str, Any]:
    """One run's figures."""
    started, cpu = time.monotonic(), time.process_time()
    with tempfile.TemporaryDirectory() as directory:
        config = configuration(Path(directory), [*settings, f"run.seed={seed}"])
    assert config.run.steps is not None
    engine, policy = make_engine(config), PolicyTrainer.open(config, steps=config.run.steps)
    groups = Groups(config, engine)
    curve, ess = zip(*steps(config, policy, groups), strict=True)
    accuracy = groups.greedy_accuracy()
    engine.close()
    policy.backend.close()
    tenth = -(-len(curve) // 10)
    reward = {"first": statistics.fmean(curve[:tenth]), "last": statistics.fmean(curve[-tenth:]), "curve": curve}
    return {
        "variant": name, "seed": seed, "settings": list(settings), "steps": len(curve), "reward": reward, "eval": [accuracy],
        "ess": min(ess), "proximal": config.proximal, "correction": config.correction,
        "wall_s": time.monotonic() - started, "cpu_s": time.process_time() - cpu,
    }  # fmt: skip


def table(finished: Runs) -> str:
    """Mean and range of the last reward over the seeds, against GRPO's, with a curve of the first seed."""
    lines = [f"{'':<22}{'seeds':>6}{'steps':>6}{'first':>8}{'last':>8}{'range':>15}{'eval':>8}{'to grpo':>9}  curve"]
    base = _last(finished[BASE]) if finished.get(BASE) else None
    for name in variants():
        runs = sorted(finished.get(name, ()), key=lambda run: int(run["seed"]))
        if not runs:
            lines.append(f"{name:<22}{0:>6}")
            continue
        lasts = [run["reward"]["last"] for run in runs]
        evals = [run["eval"][-1] for run in runs if run["eval"] and run["eval"][-1] is not None]
        first = statistics.fmean(run["reward"]["first"] for run in runs)
        gain = None if base is None else _last(runs) - base
        lines.append(
            f"{name:<22}{len(runs):>6}{max(run['steps'] for run in runs):>6}{first:>8.3f}"
            f"{_last(runs):>8.3f}{f'{min(lasts):.3f}-{max(lasts):.3f}':>15}{statistics.fmean(evals) if evals else float('nan'):>8.3f}"
            f"{'' if gain is None else f'{gain:+.3f}':>9}{'*' if gain is not None and gain < -WORSE else ' '} "
            f"{sparkline(runs[0]['reward']['curve'], width=24)}"
        )
    return "\n".join([*lines, f"* more than {WORSE} below {BASE}; last: mean reward over the last tenth of the steps"])


def finished_runs(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Runs that earlier invocations have finished."""
    runs: dict[str, list[dict[str, Any]]] = {}
    for file in sorted(folder.glob("*.json")):
        run = json.loads(file.read_text(encoding="utf-8"))
        runs.setdefault(run["variant"], []).append(run)
    return runs


def _last(runs: Sequence[Mapping[str, Any]]) -> float:
    return statistics.fmean(run["reward"]["last"] for run in runs)


def main(arguments: Sequence[str]) -> None:
    """Run the missing variants, print the table."""
    parser = parser_of(__name__, __doc__)
    parser.add_argument("--into", type=Path, required=True, help="folder with a file for each finished run")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--only", nargs="+", choices=list(variants()), default=list(variants()), metavar="loss=NAME|advantage=NAME")
    parser.add_argument("--table", action="store_true", help="only print the table of the finished runs")
    with_settings(parser)
    chosen = parser.parse_args(arguments)
    chosen.into.mkdir(parents=True, exist_ok=True)
    for seed in [] if chosen.table else chosen.seeds:
        for name in chosen.only:
            file = chosen.into / f"{name.replace('=', '-')}-{seed}.json"
            if file.exists():
                continue
            figures = run(name, [*variants()[name], *chosen.settings], seed=seed)
            unfinished = file.with_suffix(".tmp")
            unfinished.write_text(json.dumps(figures), encoding="utf-8")
            unfinished.replace(file)
            print(
                f"{name}, seed {seed}: reward {figures['reward']['first']:.3f} -> {figures['reward']['last']:.3f}, "
                f"{figures['cpu_s']:.1f} s of CPU",
                flush=True,
            )
    print(table(finished_runs(chosen.into)))
