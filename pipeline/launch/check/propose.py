"""Proposes a first configuration for a model, data, a reward and this machine: `penstock init`."""

import json
import math
import re
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from penstock.infra.backends.hardware import this_cpu, visible_gpus
from penstock.infra.errors import WrongBuild
from penstock.infra.templates import rendered
from penstock.infra.tensors.parameter_count import parameters
from penstock.pipeline.config.fields import absolute_source, is_hub_name, local_model
from penstock.pipeline.config.load import Config, ConfigError, from_table, with_device_defaults
from penstock.pipeline.config.plugins import nearest
from penstock.pipeline.data.model_files import chat_template_of, model_folder
from penstock.pipeline.data.open import open_dataset
from penstock.pipeline.data.read_files import USUAL, Dataset
from penstock.pipeline.data.references import InvalidReference, accepted
from penstock.pipeline.data.tokenization import Decoder, Renderer
from penstock.pipeline.inspect.records.runs import size
from penstock.pipeline.launch.check.fit import USUAL_COMPLETION, memory_or_usual, proposed
from penstock.pipeline.launch.check.memory import UTILIZATION, Shape, estimates, shape_of
from penstock.pipeline.rewards import functions as rewards
from penstock.pipeline.runtime.factories import check_engine

TEMPLATE = Path(__file__).with_name("proposal.toml.jinja")
FILES = (".jsonl", ".parquet")
ROWS_MEASURED = 1_000
HELD_OUT = 64
HEADROOM = 1.25
"""Room above the longest prompt that was measured."""
USUAL_CPU, USUAL_SMALL = 256, 32
"""Tokens of a completion on a CPU, and of a model that is too small to reason."""
STEPS, LEAST_STEPS, MOST_PASSES = 100, 20, 10
"""Optimizer steps of a run, and of one on few rows, which passes through them at most `MOST_PASSES` times."""
UNKNOWN = 10**9
"""Parameters that a model is taken to have where its weights are not there to be counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Facts about model, data and machine from which a configuration follows."""

    rows: int
    prompt_field: str
    answer_field: str
    longest_prompt: int
    """Tokens of the longest prompt that was measured."""
    longest_reference: int
    """Tokens of the longest reference that was measured; 0 without references."""
    context: int | None
    count: int | None
    """Parameters of the model."""
    half: bool
    """True if the model was saved in a 16-bit format."""
    template: bool
    held_out: int
    """Rows at the end of the data that are not trained on."""
    gpus: int
    cores: int
    bfloat16: bool
    shape: Shape | None = None
    """Sizes of the model; None if its memory is not estimated."""
    memory: tuple[int, ...] = ()
    """Bytes of each GPU."""

    @property
    def prompt_room(self) -> int:
        """Token limit for prompts: a quarter more than the longest measured, within the model's context."""
        room = 8 * math.ceil(self.longest_prompt * HEADROOM / 8)
        return room if self.context is None else min(room, max(self.longest_prompt, self.context // 2))

    @property
    def completion_room(self) -> int:
        """Token limit for completions: as many as this machine generates in reasonable time, at least the longest reference, if it fits."""
        usual = USUAL_SMALL if self.small else USUAL_COMPLETION if self.gpus else USUAL_CPU
        room = 8 * math.ceil(max(usual, self.longest_reference + 1) / 8)
        return room if self.context is None else max(1, min(room, self.context - self.prompt_room))

    @property
    def completion_use(self) -> str:
        """What the token limit for completions is for, as a comment in the file."""
        longest = self.longest_reference
        return f"references have up to {longest} tokens, the rest is room to reason" if longest else "time grows with it"

    @property
    def prompts_per_step(self) -> int:
        return 32 if self.gpus else 4

    @property
    def steps(self) -> int:
        """Number of optimizer steps: fewer for data that would be passed through more than `MOST_PASSES` times."""
        return min(STEPS, max(LEAST_STEPS, MOST_PASSES * (self.rows - self.held_out) // self.prompts_per_step))

    @property
    def passes(self) -> float:
        return self.steps * self.prompts_per_step / max(1, self.rows - self.held_out)

    @property
    def small(self) -> bool:
        """True if the model is too small to reason, and its updates too fine for bfloat16."""
        return (self.count or UNKNOWN) < 10**7

    @property
    def dtype(self) -> str:
        """Number format: the model's if the machine can compute with it; for a billion parameters and more, always bfloat16."""
        half = self.half or (self.count or UNKNOWN) >= 10**9
        return "bfloat16" if self.bfloat16 and half and not self.small else "float32"


def look(
    model: str,
    data: str,
    functions: Sequence[str],
    *,
    base: Path,
    prompt_field: str | None,
    answer_field: str | None,
    notify: Callable[[str], None] = lambda _: None,
) -> Inputs:
    """Collect the facts about model, data, reward and this machine from which a configuration follows; paths are relative to `base`.

    Raises `ConfigError` or `ValueError` as `propose` does.
    """
    folder = model_folder(local_model(model) if is_hub_name(model) else base / Path(model).expanduser())
    source = absolute_source(data, base)
    names = open_dataset(source, prompt_field="", answer_field="").names
    prompt = _field("prompt", prompt_field, names, source)
    answer = "" if answer_field is None and not set(USUAL["answer"]) & set(names) else _field("answer", answer_field, names, source)
    dataset = open_dataset(source, prompt_field=prompt, answer_field=answer)
    scoring = rewards.resolve([absolute_source(name, base) for name in functions])
    scoring.check(dataset[0].columns, not_json=dataset[0].not_json)
    notify(f"measuring the lengths of prompts and answers of {min(len(dataset), ROWS_MEASURED):,} rows with the model's tokenizer")
    settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    settings = {**settings, **(settings.get("text_config") or {})}
    gpus, cpu = len(visible_gpus()), this_cpu()
    longest_prompt, longest_reference = _longest(folder, dataset)
    return Inputs(
        rows=len(dataset), prompt_field=prompt, answer_field=answer, longest_prompt=longest_prompt, longest_reference=longest_reference,
        context=settings.get("max_position_embeddings"), count=parameters(folder),
        half=str(settings.get("dtype") or settings.get("torch_dtype")).endswith("float16"),
        template=chat_template_of(folder, "auto") is not None,
        held_out=min(HELD_OUT, len(dataset) // 10) if len(dataset) >= 40 and source.endswith(FILES) else 0, gpus=gpus, cores=cpu.cores,
        bfloat16=gpus > 0 or cpu.bfloat16, shape=shape_of(settings), memory=memory_or_usual(visible_gpus(), notify),
    )  # fmt: skip


def _field(what: str, column: str | None, names: Sequence[str], source: str) -> str:
    """The named column, or the first one with a usual name. Raises `ConfigError`."""
    if column is not None and column not in names:
        raise ConfigError(f"--{what}-field {column}: no such column; the rows have {', '.join(names)}{nearest(column, names)}")
    name = column or next((name for name in USUAL[what] if name in names), None)
    if name is None:
        raise ConfigError(f"{source}: no column looks like a {what} (the rows have: {', '.join(names)}); name one with --{what}-field")
    return name


def _texts(reference: Any) -> tuple[str, ...]:
    """The texts that count as right by a reference; for a value of an unusual form, that as text."""
    try:
        return accepted(reference)
    except InvalidReference:
        return (str(reference),)


def _longest(folder: Path, dataset: Dataset) -> tuple[int, int]:
    """Tokens of the longest prompt and the longest reference in the first rows."""
    renderer, decoder = Renderer(folder, max_prompt_tokens=10**9), Decoder(folder)
    rows = [dataset[index] for index in range(min(len(dataset), ROWS_MEASURED))]
    references = [text for row in rows if "answer" in row.columns for text in _texts(row.columns["answer"])]
    return max(len(renderer.render(row)[1]) for row in rows), max((len(decoder.encode(text)) for text in references), default=0)


def propose(
    model: str,
    data: str,
    functions: Sequence[str],
    *,
    base: Path,
    prompt_field: str | None = None,
    answer_field: str | None = None,
    notify: Callable[[str], None] = lambda _: None,
) -> str:
    """Text of a configuration file for the folder `base`; columns that are not named are guessed.

    `notify` gets a line for what takes a while. Raises `ConfigError`: the model, the data or the reward cannot be used as they are named.
    Raises `ValueError`: the same, from the part that reads them.
    """
    inputs = look(model, data, functions, base=base, prompt_field=prompt_field, answer_field=answer_field, notify=notify)
    return written(model, data, functions, inputs, base=base, notify=notify)


def written(model: str, data: str, functions: Sequence[str], inputs: Inputs, *, base: Path, notify: Callable[[str], None]) -> str:
    """Text of the file for these inputs. Raises `ConfigError` if the model does not fit under any division of the GPUs."""
    engine, text = "vllm", _text(model, data, functions, inputs, engine="vllm")
    try:
        check_engine(config := _loaded(text, base, inputs))
    except ConfigError as error:
        notify(str(error))
        if not isinstance(error.__cause__, WrongBuild):
            engine, text = "transformers", _text(model, data, functions, inputs, engine="transformers")
            config = _loaded(text, base, inputs)
    if inputs.gpus and inputs.shape is not None:
        text = _text(model, data, functions, inputs, engine=engine, fitting=proposed(config, inputs.shape, inputs.memory))
        _loaded(text, base, inputs)
    return text


def _loaded(text: str, base: Path, inputs: Inputs) -> Config:
    """The proposed file as a configuration, with the defaults of a machine with these GPUs. Raises `ConfigError`."""
    table = tomllib.loads(text)
    if not is_hub_name(table["model"]["path"]):
        table["model"]["path"] = str((base / table["model"]["path"]).expanduser())
    return from_table(with_device_defaults(table, gpus=inputs.gpus))


def _text(model: str, data: str, functions: Sequence[str], inputs: Inputs, *, engine: str, fitting: Config | None = None) -> str:
    """Text of the file: every section that a user is likely to change, each line with its reason.

    `fitting` has the values that follow from the memory of the GPUs. In the template a tab separates a value and its reason.
    """
    count, rank = inputs.count or UNKNOWN, 0 if fitting is None else fitting.trainer.lora_rank
    values = {
        "of": inputs, "model": model, "data": data, "functions": list(functions), "engine": engine, "vllm": engine == "vllm",
        "fitting": fitting, "rank": rank, "completion_room": inputs.completion_room, "completion_use": inputs.completion_use,
        "name": re.sub(r"[^a-z0-9]+", "-", Path(model).name.lower()).strip("-")[:24] or "run", "utilization": UTILIZATION,
        "lr": 5e-4 if count < 10**7 else 1e-5 if count < 10**9 or rank else 1e-6,
        "taken": 0 if fitting is None or inputs.shape is None else estimates(fitting, inputs.shape, gpu=True)[0].gpu,
    }  # fmt: skip
    text = rendered(TEMPLATE, values, filters={"json": partial(json.dumps, ensure_ascii=False), "size": size})
    return re.sub(r"^(.*?)\t", lambda value: f"{value[1]:<35} ", text, flags=re.MULTILINE)
