"""Finds the code that a configuration names and that a process of the run would execute.

Invariant: a name counts as code unless it is listed as none.
"""

from collections.abc import Collection, Iterable, Iterator
from typing import Any

from penstock.pipeline.algorithms.registry import ADVANTAGES, LOSSES
from penstock.pipeline.config.load import Config
from penstock.pipeline.config.plugins import split_options

DATA_SCHEMES = frozenset({"hf", "reasoning-gym", "tiny"})
"""Schemes of data sources that load rows and no code."""
_CONTENT = {"cache", "eval", "generator", "harbor", "hdf5", "iceberg", "lance", "pandas", "spark", "sql", "vortex", "webdataset", "xml"}
_FOLDERS = {"audiofolder", "imagefolder", "meshfolder", "niftifolder", "pdffolder", "videofolder"}
_SCIENCE = {"conll", "fasta", "fastq", "genbank", "mmcif", "pdb", "tsfile"}
OTHER_FORMATS = frozenset(_CONTENT | _FOLDERS | _SCIENCE)
"""`hf:` names that are formats of the library, except those that only read rows: some unpickle or connect."""
HUB = "hf://datasets/"
"""Suffixes that the library strips from a name before it determines the format."""
GAME_SCHEMES = frozenset({"gymnasium", "textarena", "tiny"})
"""Schemes of environments whose name is one of a package's own."""
TRUSTING = "trust_remote_code"
"""Option of several libraries that makes them run code from a model's or a data set's folder."""

_BACKENDS = {"all2all_backend", "attention_backend", "distributed_executor_backend", "model_impl", "tokenizer_mode"}
_KINDS = {"cudagraph_mode", "dtype", "kv_cache_dtype", "quantization", "rope_type", "runner", "scheduling_policy"}
VLLM_CHOICES = frozenset(_BACKENDS | _KINDS)
"""Arguments of vLLM whose texts are choices of its own, if they have no `.`, `:` or `/`."""

Named = tuple[str, str]
"""A key of the configuration, and the code that it names."""


def user_code(config: Config, *, sections: Collection[str] = (), overridden: Collection[str] = ()) -> list[Named]:
    """Keys and names of the user's code in a configuration: functions, commands, services, pickled states.

    `sections`: only those that a command executes, all if empty. `overridden`: keys whose values the operator has passed to the command.

    Example:
        user_code(config)  # -> [("reward.functions", "rewards.py:score")]
    """
    named = dict.fromkeys(_named(config))
    recorded = [name for name in named if not any(name[0] == key or name[0].startswith(f"{key}.") for key in overridden)]
    return [name for name in recorded if not sections or name[0].partition(".")[0] in sections]


def keys_of(overrides: Iterable[str]) -> list[str]:
    """The keys of `--set KEY=VALUE`."""
    return [text.partition("=")[0].strip() for text in overrides]


def _named(config: Config) -> Iterator[Named]:
    algorithm, trainer, environment = config.algorithm, config.trainer, config.environment.source
    for key, sources in (("data.source", config.data_sources), ("eval.source", config.eval_sources)):
        yield from ((key, source) for source in sources if _loads_code(source))
    rewards = {"reward.functions": config.reward.functions, "eval.functions": config.eval.functions or []}
    by_source = [name for functions in config.data.rewards.values() for name in functions]
    for key, functions in {**rewards, "data.rewards": by_source}.items():
        yield from ((key, name) for name in functions if ":" in split_options(name)[0])
    if environment is not None and _is_own_environment(environment):
        yield "environment.source", environment
    for key, function, builtin in (("loss", algorithm.loss, LOSSES), ("advantage", algorithm.advantage, ADVANTAGES)):
        if function is not None and split_options(function)[0] not in builtin:
            yield f"algorithm.{key}", function
    for option, value in config.rollout.vllm.items():
        if _names_code(option, value, choices=VLLM_CHOICES):
            yield f"rollout.vllm.{option}", str(value)
    if trainer.backend == "deepspeed":  # its checkpoints are pickles
        folders = {"initial_state": trainer.initial_state, "checkpoint_dir": trainer.checkpoint_dir}
        yield from ((f"trainer.{key}", folder) for key, folder in folders.items() if folder is not None)


def _loads_code(source: str) -> bool:
    """True for a data source that has neither a built-in scheme nor a file of rows."""
    plain, options = split_options(source)
    scheme, colon, name = plain.partition(":")
    other_format = scheme == "hf" and name.removeprefix(HUB) in OTHER_FORMATS
    return TRUSTING in options or other_format or bool(colon and scheme not in DATA_SCHEMES)


def _is_own_environment(source: str) -> bool:
    """True for an environment that is no package's own; `gymnasium:MODULE:ID` imports a module."""
    plain, options = split_options(source)
    scheme, _, name = plain.partition(":")
    return scheme not in GAME_SCHEMES or ":" in name or any(_names_code(option, value) for option, value in options.items())


def _names_code(option: str, value: Any, *, choices: Collection[str] | None = None) -> bool:
    """True for an option that may name a module, a class or a file, or lets a library run what it finds.

    `choices`: the options whose texts are choices of the library, if not all are.
    """
    if isinstance(value, dict):
        return any(_names_code(str(name), inner, choices=choices) for name, inner in value.items())
    if isinstance(value, list | tuple):
        return any(_names_code(option, inner, choices=choices) for inner in value)
    if isinstance(value, str):
        return option == TRUSTING or any(sign in value for sign in ".:/") or (choices is not None and option not in choices)
    return option == TRUSTING and bool(value)
