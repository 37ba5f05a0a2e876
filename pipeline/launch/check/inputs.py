"""Properties of a model, data and this machine, and the defaults that follow from them: for `penstock init`.

Every default is a property of `Inputs`, a pure function of its fields.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.infra.backends.processor import this_cpu
from penstock.infra.errors import ConfigError
from penstock.infra.tensors.parameter_count import parameters
from penstock.pipeline.config.fields import absolute_source
from penstock.pipeline.config.hub import is_hub_name, local_model
from penstock.pipeline.config.plugins import nearest
from penstock.pipeline.data import Dataset, open_dataset
from penstock.pipeline.data.chat_template import chat_template_of
from penstock.pipeline.data.conversation.model_files import model_folder
from penstock.pipeline.data.references import InvalidReference, accepted
from penstock.pipeline.data.tokenization import Decoder, Renderer
from penstock.pipeline.launch.placement import visible_gpus
from penstock.pipeline.rewards import functions as rewards

PROMPTS = ("prompt", "question", "problem", "instruction", "query", "input", "messages", "text")
ANSWERS = ("answer", "solution", "target", "label", "expected", "ground_truth", "output", "response")
FILES = (".jsonl", ".parquet")
ROWS_MEASURED = 1_000
HELD_OUT = 64
HEADROOM = 1.25
"""Room above the longest prompt that was measured."""
USUAL_GPU, USUAL_CPU, USUAL_SMALL = 1024, 256, 32
"""Tokens of a completion: on a GPU, on a CPU, and of a model that is too small to reason."""
UNKNOWN = 10**9
"""Parameters that a model is taken to have where its weights are not there to be counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Properties of a model, data and this machine that a configuration depends on."""

    rows: int
    prompt_field: str
    answer_field: str
    longest_prompt: int
    """Tokens."""
    longest_answer: int
    """Tokens; 0 without reference answers."""
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

    @property
    def prompt_room(self) -> int:
        """Tokens for a prompt: a quarter more than the longest that was measured, as far as the model's context allows."""
        room = 8 * math.ceil(self.longest_prompt * HEADROOM / 8)
        return room if self.context is None else min(room, max(self.longest_prompt, self.context // 2))

    @property
    def completion_room(self) -> int:
        """Tokens for a completion: as many as this machine generates in reasonable time, at least the longest answer, in the context."""
        usual = USUAL_SMALL if self.small else USUAL_GPU if self.gpus else USUAL_CPU
        room = 8 * math.ceil(max(usual, self.longest_answer + 1) / 8)
        return room if self.context is None else max(1, min(room, self.context - self.prompt_room))

    @property
    def small(self) -> bool:
        """True if the model is too small to reason, and its updates too fine for bfloat16."""
        return (self.count or UNKNOWN) < 10**7

    @property
    def dtype(self) -> str:
        """The model's own format if the machine multiplies it; from a billion parameters on always bfloat16."""
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
    """Read the model, the data and the reward, with paths relative to `base`. Raises `ConfigError` or `ValueError` as `propose` does."""
    folder = model_folder(local_model(model) if is_hub_name(model) else base / Path(model).expanduser())
    source = absolute_source(data, base)
    names = open_dataset(source, prompt_field="", answer_field="").names
    prompt = _field("prompt", prompt_field, PROMPTS, names, source)
    answer = "" if answer_field is None and not set(ANSWERS) & set(names) else _field("answer", answer_field, ANSWERS, names, source)
    dataset = open_dataset(source, prompt_field=prompt, answer_field=answer)
    scoring = rewards.resolve([absolute_source(name, base) for name in functions])
    scoring.check(dataset[0].columns, without_json=dataset[0].without_json)
    notify(f"measuring prompts and answers of {min(len(dataset), ROWS_MEASURED):,} rows with the model's tokenizer")
    settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    settings = {**settings, **(settings.get("text_config") or {})}
    gpus, cpu = len(visible_gpus()), this_cpu()
    longest_prompt, longest_answer = _longest(folder, dataset)
    return Inputs(
        rows=len(dataset),
        prompt_field=prompt,
        answer_field=answer,
        longest_prompt=longest_prompt,
        longest_answer=longest_answer,
        context=settings.get("max_position_embeddings"),
        count=parameters(folder),
        half=str(settings.get("dtype") or settings.get("torch_dtype")).endswith("float16"),
        template=chat_template_of(folder, "auto") is not None,
        held_out=min(HELD_OUT, len(dataset) // 10) if len(dataset) >= 40 and source.endswith(FILES) else 0,
        gpus=gpus,
        cores=cpu.cores,
        bfloat16=gpus > 0 or cpu.bfloat16,
    )


def _field(what: str, column: str | None, usual: Sequence[str], names: Sequence[str], source: str) -> str:
    """The named column, else the first with a usual name."""
    if column is not None and column not in names:
        raise ConfigError(f"--{what}-field {column}: the rows have {', '.join(names)}{nearest(column, names)}")
    name = column or next((name for name in usual if name in names), None)
    if name is None:
        raise ConfigError(f"{source}: no column looks like a {what} (the rows have: {', '.join(names)}); name one with --{what}-field")
    return name


def _texts(answer: Any) -> tuple[str, ...]:
    """The accepted reference answers; of another value its text."""
    try:
        return accepted(answer)
    except InvalidReference:
        return (str(answer),)


def _longest(folder: Path, dataset: Dataset) -> tuple[int, int]:
    """Tokens of the longest prompt and of the longest reference answer of the first rows."""
    renderer, decoder = Renderer(folder, max_prompt_tokens=10**9), Decoder(folder)
    rows = [dataset[index] for index in range(min(len(dataset), ROWS_MEASURED))]
    answers = [text for row in rows if "answer" in row.columns for text in _texts(row.columns["answer"])]
    return max(len(renderer.render(row)[1]) for row in rows), max((len(decoder.encode(text)) for text in answers), default=0)
