"""Reads and validates a configuration: a TOML file and dotted overrides, and defaults that depend on the machine.

An error is one line with the key, the value and, for an unknown key, the nearest valid one (`ConfigError`, exit status 2). Defaults are
resolved here and written to the run's record, which then means the same on every machine. The trainer's threads depend on the model and
the cores alone, because last bits depend on the threads, and runs of all schedules end in equal weights.
"""

import difflib
import json
import tomllib
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError

from penstock.infra.backends.hardware import Cpu
from penstock.infra.errors import ConfigError, PenstockError
from penstock.infra.tensors.parameter_count import parameters
from penstock.pipeline.config.fields import FOREIGN_KEYS, Resolve, Section, is_hub_name
from penstock.pipeline.config.run_config import Config
from penstock.pipeline.config.schema import EvalSection, RolloutSection, TrainerSection
from penstock.pipeline.config.security import refuse_secrets
from penstock.pipeline.config.validate import first_mistake
from penstock.topics.wire.secrets import without_passwords

SHOWN_MISTAKES = 5
SMALL = 10_000_000
"""Models with fewer parameters are trained with one thread: a second one would wait longer than it computes."""
SECTIONS: Mapping[str, type[Section]] = {"rollout": RolloutSection, "trainer": TrainerSection, "eval": EvalSection}
ON_DEVICE_OF = {"eval": "rollout"}
"""Section without a device of its own -> section with the device of its engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceDefault:
    """A key whose default is different on a GPU."""

    key: str
    gpu: Any
    why: str
    only: tuple[str, str] | None = None
    """Condition: a key of the same section and its value."""
    unless: tuple[str, Any] | None = None
    """Exception: a key of the same section and its value."""

    @property
    def cpu(self) -> Any:
        """The default without a GPU, from the schema."""
        section, _, name = self.key.partition(".")
        return SECTIONS[section].model_fields[name].default

    def holds_for(self, section: Mapping[str, Any]) -> bool:
        """True if the section's values meet the condition of this default and are not its exception."""
        only, unless = self.only, self.unless
        return (only is None or section[only[0]] == only[1]) and (unless is None or section[unless[0]] != unless[1])


DEVICE_DEFAULTS = (
    DeviceDefault(key="rollout.dtype", gpu="bfloat16", why="half the memory and half the bytes of a version, twice the speed"),
    DeviceDefault(
        key="rollout.engine_process", gpu=True, only=("engine", "vllm"),
        why="loading and hashing a version would take CPU time from the engine",
    ),
    DeviceDefault(
        key="rollout.kv_cache", gpu="keep", only=("engine", "vllm"),
        why="recomputing takes a prefill of all samples in flight at each version: up to seconds of a GPU",
    ),
    DeviceDefault(key="trainer.dtype", gpu="bfloat16", why="optimizer, masters and gradient sums stay in float32"),
    DeviceDefault(key="trainer.tf32", gpu=True, why="float32 products with 10 bits of mantissa, many times faster"),
    DeviceDefault(
        key="trainer.micro_batch_by", gpu="computed",
        why="passes of equal, full size; padded tokens are about three times the computed ones",
    ),
    DeviceDefault(
        key="trainer.zero_stage", gpu=2, only=("backend", "deepspeed"),
        why="DeepSpeed's stage 1 does not sum bfloat16 gradients in float32",
    ),
    DeviceDefault(
        key="trainer.compile", gpu=True, unless=("zero_stage", 3),
        why="a pass takes up to a quarter less time, and the first ones 15 seconds more",
    ),
    DeviceDefault(key="eval.engine", gpu="rollout", why="an evaluator's own GPU would be idle between evaluations"),
)  # fmt: skip

COLOCATED_DEFAULTS = (("rollout", "workers", 1), ("eval", "engine", "rollout"))
"""Section, key and default if trainer and rollout worker share a device."""


def with_device_defaults(table: Mapping[str, Any], *, gpus: int) -> dict[str, Any]:
    """The table with the GPU defaults of absent keys in sections on a GPU, and with those of a shared device.

    `gpus` is this machine's number of GPUs.
    """
    filled = deepcopy(dict(table))
    for default in DEVICE_DEFAULTS:
        name, _, key = default.key.partition(".")
        section = filled.get(name, {})
        if not isinstance(section, dict) or not on_gpu(filled.get(ON_DEVICE_OF.get(name, name), {}), gpus):
            continue
        if default.holds_for({field: description.default for field, description in SECTIONS[name].model_fields.items()} | section):
            filled.setdefault(name, section).setdefault(key, default.gpu)
    launch = filled.get("launch")
    for name, key, value in COLOCATED_DEFAULTS if isinstance(launch, dict) and launch.get("placement") == "colocated" else ():
        if isinstance(section := filled.setdefault(name, {}), dict):
            section.setdefault(key, value)
    return filled


def on_gpu(section: Any, gpus: int) -> bool:
    """True if the `device` of a section is a GPU, on a machine with this number of GPUs."""
    device = section.get("device", "auto") if isinstance(section, Mapping) else None
    return isinstance(device, str) and (device.startswith("cuda") or (device == "auto" and gpus > 0))


def with_cpu_defaults(table: Mapping[str, Any], *, cpu: Cpu | None, on_gpu: bool) -> dict[str, Any]:
    """The table with `trainer.dtype = "auto"` and, for a trainer on the CPU or with its optimizer there, absent `threads` resolved; `cpu`
    may be unknown.

    Example:
        with_cpu_defaults({"trainer": {"dtype": "auto"}}, cpu=Cpu(cores=8, bfloat16=True), on_gpu=False)
        # -> {"trainer": {"dtype": "bfloat16", "threads": 4}}
    """
    filled = deepcopy(dict(table))
    trainer = filled.setdefault("trainer", {})
    if not isinstance(trainer, dict):
        return filled  # refused by validation
    if trainer.get("dtype") == "auto":
        trainer["dtype"] = "bfloat16" if on_gpu or (cpu is not None and cpu.bfloat16) else "float32"
    if cpu is None or "threads" in trainer:
        return filled
    processes, model = trainer.get("processes"), filled.get("model")
    processes = processes if isinstance(processes, int) else 1
    if not on_gpu:
        size = _parameters(model.get("path") if isinstance(model, Mapping) else None)
        trainer["threads"] = trainer_threads(parameters=size, cores=cpu.cores, processes=processes)
    elif trainer.get("offload", "none") != "none":
        trainer["threads"] = max(1, cpu.cores // max(1, processes))
    return filled


def trainer_threads(*, parameters: int | None, cores: int, processes: int) -> int:
    """Threads of each trainer process: one for a small model, else half of the cores in total; `parameters` may be unknown."""
    return 1 if parameters is not None and parameters < SMALL else max(1, cores // 2 // max(1, processes))


def _parameters(path: object) -> int | None:
    """Parameter count of a model; None for one on the hub or if its files cannot be read, which is an error only when it is loaded."""
    if not isinstance(path, str) or is_hub_name(path):
        return None
    try:
        return parameters(Path(path).expanduser())
    except (PenstockError, OSError):
        return None


__all__ = ["Config", "ConfigError", "from_json", "from_table", "load", "override", "to_json", "with_paths"]


def load(path: str | Path, overrides: Sequence[str] = (), *, gpus: int = 0, cpu: Cpu | None = None) -> Config:
    """Read a TOML file and apply `a.b=c` overrides; relative paths are relative to the file (overrides: to the working directory).

    `gpus` and `cpu` are this machine's number of GPUs and its processor, which determine defaults. Raises `ConfigError`: one line with key,
    value and the nearest valid key.
    """
    file = Path(path)
    try:
        Path.cwd()
    except FileNotFoundError as error:
        raise ConfigError("the working directory was deleted: change to an existing one") from error
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {file}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ConfigError(f"{file}:{line}: not UTF-8 text (byte 0x{error.object[error.start]:02x}): save the file as UTF-8") from error
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file}: not valid TOML: {error}") from error
    _make_absolute(table, file.resolve().parent)
    for override in overrides:
        _apply(table, override)
    refuse_secrets(table)
    filled = with_device_defaults(table, gpus=gpus)
    return from_table(with_cpu_defaults(filled, cpu=cpu, on_gpu=on_gpu(filled.get("trainer", {}), gpus)))


def override(config: Config, overrides: Sequence[str]) -> Config:
    """Apply `a.b=c` overrides to a configuration; paths are relative to the working directory. Raises `ConfigError`."""
    table = json.loads(to_json(config))
    for text in overrides:
        _apply(table, text)
    refuse_secrets(table, recorded=json.loads(to_json(config)))
    changed = from_table(table)
    return with_values(changed, "kafka", security=config.kafka.security | changed.kafka.security)


def with_values(config: Config, section: str, **values: Any) -> Config:
    """Replace values in a section of a configuration, without validation."""
    return config.model_copy(update={section: getattr(config, section).model_copy(update=values)})


def with_paths(table: Mapping[str, Any], base: Path) -> dict[str, Any]:
    """Make relative paths in a table of sections absolute, from the directory `base`."""
    copied = {name: dict(values) if isinstance(values, Mapping) else values for name, values in table.items()}
    _make_absolute(copied, base)
    return copied


def from_json(text: str) -> Config:
    """The configuration in a run's record, without passwords that earlier releases stored there. Raises `ConfigError`.

    Records without `algorithm.defaults` use the first edition of the defaults, those without `trainer.share_prompts` padded rows.
    """
    table = json.loads(without_passwords(text))
    table.setdefault("algorithm", {}).setdefault("defaults", 1)
    table.setdefault("trainer", {}).setdefault("share_prompts", "off")
    return from_table(table)


def from_table(table: Mapping[str, Any]) -> Config:
    """Validate a table of sections. Raises `ConfigError`."""
    try:
        # JSON has no tuples and TOML writes 1 for 1.0: strict validation of JSON accepts both, and still refuses "3" for 3.
        config = Config.model_validate_json(json.dumps(table, default=str))
    except ValidationError as error:
        raise ConfigError(_one_line(error)) from error
    if mistake := first_mistake(config):
        raise ConfigError(mistake)
    return config


def to_json(config: Config) -> str:
    """The configuration for a run's record, with all defaults and without `kafka.security`."""
    return config.model_dump_json()


def _one_line(error: ValidationError) -> str:
    """The validation errors as one line, the first of each key with its value and a suggestion."""
    first: dict[tuple[int | str, ...], str] = {}
    for mistake in error.errors(include_url=False):
        first.setdefault(mistake["loc"][:2], _mistake(mistake))
    more = f" | and {len(first) - SHOWN_MISTAKES} more" if len(first) > SHOWN_MISTAKES else ""
    return " | ".join(list(first.values())[:SHOWN_MISTAKES]) + more


def _mistake(first: Mapping[str, Any]) -> str:
    """One validation error with key, value and a suggestion."""
    location = [str(part) for part in first["loc"] if not str(part).startswith(("tuple[", "list["))]
    key, value, kind = ".".join(location), first.get("input"), first["type"]
    if kind == "extra_forbidden":
        return f"{key} = {value!r}: unknown key{_meant(location)}"
    if kind == "missing":
        return f"{key}: is required"
    if kind == "value_error":
        return f"{key}: {first['ctx']['error']}"
    if kind in ("model_type", "dict_type"):
        return f"{key} = {value!r}: {key} is a section; write [{key}] with its keys below it"
    if kind in ("tuple_type", "list_type"):
        return f"{key} = {value!r}: a list is expected; write {key} = {json.dumps([value])}"
    return f"{key} = {value!r}: {first['msg'][0].lower()}{first['msg'][1:]}"


def _meant(location: Sequence[str]) -> str:
    """Suggest a key for an unknown one: the synonym of another trainer's key, the same key in another section, or a similar one."""
    *sections, name = location
    section: Any = Config
    for part in sections:
        section = section.model_fields[part].annotation or Config
    for key in (".".join(location), name):
        if key in FOREIGN_KEYS:
            meant = FOREIGN_KEYS[key]
            return f"; did you mean {meant!r}?" if meant else "; no such key, see docs/reference/configuration.md"
    same_name = [f"{top}.{name}" for top, field in Config.model_fields.items() if name in getattr(field.annotation, "model_fields", ())]
    close = same_name or [".".join([*sections, near]) for near in difflib.get_close_matches(name, section.model_fields, n=1, cutoff=0.7)]
    return f"; did you mean {close[0]!r}?" if close else "; see docs/reference/configuration.md"


def _apply(table: dict[str, Any], override: str) -> None:
    """Set the value of one `a.b=c` override in the table. Raises `ConfigError`."""
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or len(parts) < 2 or not all(parts):
        raise ConfigError(f"--set {override}: expected section.key=value{_meant(parts) if len(parts) == 1 and parts[0] else ''}")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    section = table
    for part in parts[:-1]:
        inner = section.setdefault(part, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"--set {override}: {part} is not a section")
        section = inner
    section[parts[-1]] = value
    _make_absolute(table, Path.cwd())


def _make_absolute(table: dict[str, Any], base: Path) -> None:
    """Make the relative paths in a table of sections absolute. Raises `ConfigError`."""
    for name, section in Config.model_fields.items():
        values = table.get(name)
        if isinstance(values, dict):
            for key, field in cast(type[Section], section.annotation).model_fields.items():
                for mark in field.metadata if key in values else ():
                    if isinstance(mark, Resolve):
                        values[key] = _resolved(values[key], mark, base, key=f"{name}.{key}")


def _resolved(value: Any, resolve: Resolve, base: Path, *, key: str) -> Any:
    """Make the path in a text, or in each item of a list, absolute; other values stay, and validation rejects them.

    Raises `ConfigError` for a text that is no path.
    """
    if isinstance(value, list):
        return [_resolved(item, resolve, base, key=key) for item in value]
    try:
        return resolve.function(value, base) if isinstance(value, str) else value
    except (ValueError, RuntimeError) as error:  # a null byte, a user without a home
        raise ConfigError(f"{key}: {value[:80]!r} is not a path: {error}") from error
