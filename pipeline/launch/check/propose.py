"""A configuration to begin with, for a model, data, a reward and this machine: `penstock init`.

The rule: each value is read from the model, the data or the machine, or its comment says when to change it; what is written passes the
checks of any configuration.
"""

import json
import math
import os
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.pipeline.config.fields import absolute_source
from penstock.pipeline.config.hub import is_hub_name, local_model
from penstock.pipeline.config.load import Config, ConfigError, from_table
from penstock.pipeline.config.plugins import nearest
from penstock.pipeline.envs import rewards
from penstock.pipeline.envs.datasets import Dataset, open_dataset
from penstock.pipeline.envs.tokenization import Renderer, chat_template_of, model_folder
from penstock.pipeline.launch.check.disk import parameters
from penstock.pipeline.launch.placement import visible_gpus
from penstock.pipeline.runtime.factories import check_engine

PROMPTS = ("prompt", "question", "problem", "instruction", "query", "input", "messages", "text")
ANSWERS = ("answer", "solution", "target", "label", "expected", "ground_truth", "output", "response")
FILES = (".jsonl", ".parquet")
ROWS_MEASURED = 1_000
HELD_OUT = 64
HEADROOM = 1.25
"""Room above the longest prompt that was measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a model, data and this machine are, as far as a configuration depends on it."""

    rows: int
    prompt_field: str
    answer_field: str
    longest_prompt: int
    """Tokens."""
    context: int | None
    count: int | None
    """Parameters of the model."""
    template: bool
    held_out: int
    """Rows at the end of the data that are not trained on."""
    gpus: int
    cores: int
    bfloat16: bool

    @property
    def prompt_room(self) -> int:
        """Tokens for a prompt: a quarter more than the longest that was measured, as far as the model's context allows."""
        room = 8 * math.ceil(self.longest_prompt * HEADROOM / 8)
        return room if self.context is None else min(room, max(self.longest_prompt, self.context // 2))

    @property
    def completion_room(self) -> int:
        """Tokens for a completion."""
        return 256 if self.context is None else max(1, min(256, self.context - self.prompt_room))


def propose(
    model: str, data: str, functions: Sequence[str], *, base: Path, prompt_field: str | None = None, answer_field: str | None = None
) -> str:
    """The text of a configuration file that lies in the folder `base`; the columns are guessed from their names where none is given.

    Raises:
        ConfigError: the model, the data or the reward cannot be used as they are named.
        ValueError: the same, from the part that reads them.
    """
    found = _look(model, data, functions, base=base, prompt_field=prompt_field, answer_field=answer_field)
    engine = "vllm"
    try:
        check_engine(_loaded(_text(model, data, functions, found, engine=engine, steps=100), base))
    except ConfigError:
        engine = "transformers"
    text = _text(model, data, functions, found, engine=engine, steps=100)
    _loaded(text, base)
    return text


def _loaded(text: str, base: Path) -> Config:
    """The configuration, with paths made absolute as `load` does it."""
    table = tomllib.loads(text)
    if not is_hub_name(table["model"]["path"]):
        table["model"]["path"] = str((base / table["model"]["path"]).expanduser())
    return from_table(table)


def _look(model: str, data: str, functions: Sequence[str], *, base: Path, prompt_field: str | None, answer_field: str | None) -> Found:
    folder = model_folder(local_model(model) if is_hub_name(model) else base / Path(model).expanduser())
    source = absolute_source(data, base)
    names = open_dataset(source, prompt_field="", answer_field="").names
    prompt = _field("prompt", prompt_field, PROMPTS, names, source)
    answer = "" if answer_field is None and not set(ANSWERS) & set(names) else _field("answer", answer_field, ANSWERS, names, source)
    dataset = open_dataset(source, prompt_field=prompt, answer_field=answer)
    scoring = rewards.resolve([absolute_source(name, base) for name in functions])
    scoring.check(dataset[0].columns)
    settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    gpus = len(visible_gpus())
    return Found(
        rows=len(dataset),
        prompt_field=prompt,
        answer_field=answer,
        longest_prompt=_longest(folder, dataset),
        context=settings.get("max_position_embeddings"),
        count=parameters(folder),
        template=chat_template_of(folder, "auto") is not None,
        held_out=min(HELD_OUT, len(dataset) // 10) if len(dataset) >= 40 and source.endswith(FILES) else 0,
        gpus=gpus,
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        bfloat16=gpus > 0 or bool(re.search(r"\b(avx512_bf16|amx_bf16)\b", _cpu())),
    )


def _field(what: str, given: str | None, known: Sequence[str], names: Sequence[str], source: str) -> str:
    """The given column, else the first that has a usual name."""
    if given is not None and given not in names:
        raise ConfigError(f"--{what}-field {given}: the rows have {', '.join(names)}{nearest(given, names)}")
    name = given or next((name for name in known if name in names), None)
    if name is None:
        raise ConfigError(f"{source}: no column looks like a {what} (the rows have: {', '.join(names)}); name one with --{what}-field")
    return name


def _longest(folder: Path, dataset: Dataset) -> int:
    renderer = Renderer(folder, max_prompt_tokens=10**9)
    return max(len(renderer.render(dataset[index])[1]) for index in range(min(len(dataset), ROWS_MEASURED)))


def _cpu() -> str:
    file = Path("/proc/cpuinfo")
    return file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""


def _text(model: str, data: str, functions: Sequence[str], found: Found, *, engine: str, steps: int) -> str:
    """The file: every section that a person is likely to change, each line with its reason."""
    sections = (
        _beginning(model, found, steps=steps),
        _data(data, found),
        _reward(functions),
        _schedule(found, engine=engine),
        _rollout(found, engine=engine),
        _trainer(found),
        _eval(data, found),
    )
    return "\n\n".join("\n".join(lines) for lines in sections if lines) + "\n"


def _line(key: str, value: Any, why: str = "") -> str:
    text = f"{key} = {json.dumps(value, ensure_ascii=False)}"
    return f"{text:<36}# {why}" if why else text


def _beginning(model: str, found: Found, *, steps: int) -> list[str]:
    size = f"{found.count / 1e6:,.1f} million parameters" if found.count else "size unknown"
    return [
        "# Written by `penstock init`. Every key: docs/configuration.md. Paths are relative to this file.",
        "# `penstock check` tries all of it and draws two samples; `penstock run` starts it.",
        "[run]",
        _line("name", _name(model), "first part of the run's id"),
        _line("steps", steps, "optimizer steps; or epochs = passes over the data"),
        _line("seed", 0),
        "",
        "[model]",
        _line("path", model, size),
    ]


def _name(model: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", Path(model).name.lower()).strip("-")[:24] or "run"


def _data(data: str, found: Found) -> list[str]:
    lines = [
        "[data]",
        _line("source", data, f"{found.rows:,} rows"),
        _line("prompt_field", found.prompt_field),
        _line("answer_field", found.answer_field, "reward functions get it as `answer`" if found.answer_field else "there is none"),
    ]
    if found.held_out:
        lines.append(_line("limit", found.rows - found.held_out, f"the last {found.held_out} rows are held out, see [eval]"))
    template = "the model's chat template" if found.template else "the model has no chat template: prompts go in as they are"
    return [
        *lines,
        _line("chat_template", "auto", template),
        _line("max_prompt_tokens", found.prompt_room, f"the longest of the first rows has {found.longest_prompt}"),
    ]


def _reward(functions: Sequence[str]) -> list[str]:
    return [
        "[reward]",
        _line("functions", list(functions), "f(completions, **columns) -> a number for each"),
        '# on_error = "drop"                 # go on where it breaks often, instead of stopping the run',
    ]


def _schedule(found: Found, *, engine: str) -> list[str]:
    mode, why = ("in_flight", "new weights between two decode steps") if engine == "vllm" else ("pipelined", "draws ahead of the trainer")
    return [
        "[schedule]",
        _line("mode", mode, f"{why}; docs/schedules.md"),
        _line("prompts_per_step", 32 if found.gpus else 4, "groups in an optimizer step"),
        _line("samples_per_prompt", 8, "completions in a group; more where rewards are seldom"),
        "",
        "[sampling]",
        _line("max_new_tokens", found.completion_room, "what is longer is cut off; costs time in proportion"),
        _line("temperature", 1.0),
        "",
        "[algorithm]",
        _line("loss", "dapo", "or grpo, dr_grpo, gspo, cispo: docs/algorithms.md"),
    ]


def _rollout(found: Found, *, engine: str) -> list[str]:
    dtype = "bfloat16" if found.bfloat16 and engine == "vllm" else "float32"
    workers = max(1, found.gpus - 1)  # all but the trainer's
    lines = [
        "[rollout]",
        _line("engine", engine, "draws all samples side by side" if engine == "vllm" else "vLLM is not here, or cannot load this model"),
        _line("workers", workers),
        _line("dtype", dtype),
    ]
    if found.gpus > 1:
        lines.append(_line("gpus_per_worker", 1))
    elif found.gpus == 1 and engine == "vllm":
        lines += ["", "[rollout.vllm]", _line("gpu_memory_utilization", 0.4, "trainer and engine share the one GPU")]
    elif not found.gpus:
        lines.append(_line("threads", max(1, found.cores // 2), f"half of {found.cores} cores"))
    return lines


def _trainer(found: Found) -> list[str]:
    count = found.count or 10**9
    lr = 5e-4 if count < 10**7 else 1e-5 if count < 10**9 else 1e-6
    lines = [
        "[trainer]",
        _line("lr", lr, "by the model's size; halve it if the reward collapses"),
        _line("warmup_steps", 5),
        _line("dtype", "bfloat16" if found.bfloat16 and count >= 10**7 else "float32", "weights; sums and moments are float32"),
        _line("micro_batch_tokens", 16_384 if found.gpus else 2_048, "halve it when memory runs out"),
        _line("checkpoint_every", 25, "steps; a resumed run repeats those after the newest"),
    ]
    if found.gpus > 1:
        lines.append(_line("gpus", 1))
    elif not found.gpus:
        lines.append(_line("threads", max(1, found.cores - found.cores // 2)))
    return lines


def _eval(data: str, found: Found) -> list[str]:
    if not found.held_out:
        return []
    return [
        "[eval]",
        _line("source", data),
        *([_line("engine", "rollout", "a rollout worker lends its engine, so that evaluations need no GPU")] if found.gpus else []),
        _line("start", found.rows - found.held_out),
        _line("limit", found.held_out, "held-out prompts"),
        _line("every", 25, "versions; the first and the last are always evaluated"),
        _line("samples", 1, "beside the greedy one"),
        "# threshold = 1.0                   # reward from which a completion counts as solved",
    ]
