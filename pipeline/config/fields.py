"""Types of configuration values: bounded numbers, names with a suggestion, paths; and the names that other frameworks give to keys."""

import json
import os
import shlex
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from penstock.infra.errors import BackendError, ConfigError
from penstock.pipeline.config.plugins import nearest, split_options

SCHEME = "hf:"
FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
"""Files of a model, without copies of the weights in other formats."""


def is_hub_name(path: str) -> bool:
    return path.startswith(SCHEME)


def local_model(path: str) -> Path:
    """The directory of a model; one on the hub is downloaded to the cache if it is missing. Raises `BackendError`."""
    return _snapshot(path) if is_hub_name(path) else Path(path).expanduser()


def pinned(path: str) -> str:
    """Add the current commit to the name of a model on the hub; other paths are unchanged. Raises `BackendError`."""
    if not is_hub_name(path):
        return path
    return f"{path.partition('@')[0]}@{_snapshot(path).name}"


@cache
def _snapshot(name: str) -> Path:
    """Directory of a model on the hub in the local cache, downloaded if missing. Raises `BackendError`."""
    repository, _, revision = name.removeprefix(SCHEME).partition("@")
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise BackendError(f"model.path: {name} needs the package huggingface_hub: pip install '.[trainer]' in the checkout") from error
    try:
        return Path(snapshot_download(repository, revision=revision or None, allow_patterns=FILES))
    except Exception as error:  # the library reads the network and a cache: its errors have no common type
        if type(error).__name__.startswith("LocalEntry"):
            here = "`penstock model smollm2 DIR` creates this model offline; or " if repository.endswith("/SmolLM2-135M-Instruct") else ""
            fix = f"{here}run `hf download {repository}` on a machine with network access"
            raise BackendError(f"model.path: {name} is not in the local cache and the hub cannot be reached; {fix}") from error
        reason = " ".join(str(error).split())[:200]
        raise BackendError(
            f"model.path: cannot get {name} from the cache or the hub ({type(error).__name__}: {reason}); "
            f"download it with `hf download {repository}`, or set model.path to a directory"
        ) from error


_SYNONYMS = {
    "run.steps": "max_steps",
    "run.epochs": "num_train_epochs",
    "model.path": "model.name model_name model_name_or_path",
    "data.source": "dataset dataset_name train_files",
    "data.max_prompt_tokens": "max_prompt_length",
    "reward.functions": "reward_funcs",
    "reward.weights": "reward_weights",
    "schedule.prompts_per_step": "train_batch_size batch_size",
    "schedule.samples_per_prompt": "num_generations rollouts_per_example group_size",
    "schedule.max_lag": "max_async_level",
    "sampling.max_new_tokens": "max_completion_length max_response_length max_tokens",
    "algorithm.loss": "loss_type",
    "algorithm.kl_coef": "beta kl_beta",
    "algorithm.clip_low": "epsilon",
    "algorithm.clip_high": "epsilon_high",
    "algorithm.clip_dual": "delta",
    "rollout.engine": "use_vllm",
    "rollout.workers": "num_workers",
    "rollout.vllm.gpu_memory_utilization": "gpu_memory_utilization",
    "rollout.vllm.tensor_parallel_size": "tensor_parallel tensor_parallel_size",
    "trainer.lr": "learning_rate",
    "trainer.lr_schedule": "lr_scheduler_type",
    "trainer.dtype": "bf16",
    "trainer.lora_rank": "use_peft use_lora lora_r",
    "trainer.micro_batch_tokens": "per_device_train_batch_size",
    "trainer.checkpoint_every": "save_steps",
    "trainer.deepspeed_config": "deepspeed",
    "trainer.offload_activations": "activation_offloading",
    "eval.every": "eval_steps",
    "wandb.enabled": "report_to wandb",
    "tensorboard.enabled": "tensorboard",
}
FOREIGN_KEYS: Mapping[str, str | None] = {"push_to_hub": None, **{name: key for key, names in _SYNONYMS.items() for name in names.split()}}
"""Key of another trainer, or its last part -> our key; None if there is none."""

FOREIGN_VALUES: Mapping[str, str] = {
    "async": "in_flight",
    "asynchronous": "in_flight",
    "sync": "synchronous",
    "on_policy": "synchronous",
    "ppo": "grpo",
    "bnpo": "dapo",
    "hf": "transformers",
    "huggingface": "transformers",
}


Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
FinitePositive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
"""Finite, because JSON has no infinity: the record would have `null`, which means absent."""
LONGEST_NAME = 255


def one_of(names: Collection[str], *, or_none: bool = False, or_function: bool = False, options: bool = False) -> AfterValidator:
    """A validator that rejects other names and suggests the nearest one.

    `or_none` accepts "none", `or_function` accepts package:function, `options` accepts options after a question mark.
    """

    def check(name: str) -> str:
        if (split_options(name)[0] if options else name) in names or (or_none and name == "none") or (or_function and ":" in name):
            return name
        function = ", or package:function" if or_function else ""
        meant = FOREIGN_VALUES.get(name)
        hint = f"; did you mean {meant!r}?" if meant in names else nearest(name, names)
        raise ValueError(f"{name!r} is unknown; expected one of {', '.join(names)}{function}{hint}")

    return AfterValidator(check)


@dataclass(frozen=True, slots=True)
class Resolve:
    """Marks a text that contains a relative path; `function(text, base)` makes it absolute, or reads the file."""

    function: Callable[[str, Path], Any]


def absolute(text: str, base: Path) -> str:
    """Make a path absolute. Raises `ValueError` if a name in it is too long for a file system."""
    path = (base / Path(text).expanduser()).resolve()
    if long := next((part for part in path.parts if len(os.fsencode(part)) > LONGEST_NAME), None):
        raise ValueError(f"the file name {long[:40]}… has {len(os.fsencode(long))} bytes, limit {LONGEST_NAME}")
    return str(path)


def absolute_source(text: str, base: Path) -> str:
    """Make the path in a data source or in file.py:function absolute; names of packages, hubs and tasks stay."""
    scheme, colon, rest = text.partition(":")
    if scheme == "hf" and colon and rest.startswith((".", "~")):
        return f"hf:{absolute(rest, base)}"
    if scheme.endswith(".py") and colon:
        return f"{absolute(scheme, base)}:{rest}"
    return absolute(text, base) if not colon and ("/" in text or text.endswith((".jsonl", ".parquet"))) else text


def absolute_model(text: str, base: Path) -> str:
    """Make the path of a model absolute; a name on the hub stays."""
    return text if is_hub_name(text) else absolute(text, base)


def absolute_template(text: str, base: Path) -> str:
    """Make the path of a chat template absolute; auto, on and off stay."""
    return text if text in ("auto", "on", "off") else absolute(text, base)


def absolute_environment(text: str, base: Path) -> str:
    """Make the files in `agent:COMMAND` and the path in file.py:Class absolute; other names stay."""
    if not text.startswith("agent:"):
        return absolute_source(text, base)
    try:
        words = shlex.split(text.removeprefix("agent:"))
    except ValueError as error:
        raise ValueError(f"{text!r} is not a command: {error}") from error
    return f"agent:{shlex.join(absolute(word, base) if (base / word).is_file() else word for word in words)}"


def contents(text: str, base: Path) -> Any:
    """Read a JSON file, so that the run's record does not depend on it. Raises `ConfigError`."""
    file = Path(absolute(text, base))
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigError(f"{file} is not valid JSON: {error}") from error


JSON_FILE = Resolve(contents)
PATH, SOURCE, ENVIRONMENT = Resolve(absolute), Resolve(absolute_source), Resolve(absolute_environment)


class Section(BaseModel):
    """A table of the configuration file; unknown keys are errors, and values cannot change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
