"""Decides which code of a run this process may execute: code that the run's key signed, and code that the operator trusts.

A name in a configuration counts as code unless it is listed as none.
"""

import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from penstock.infra.errors import ConfigError, RunNotFound
from penstock.infra.log import Log
from penstock.pipeline.algorithms.registry import ADVANTAGES, LOSSES
from penstock.pipeline.config.load import Config, from_json
from penstock.pipeline.config.plugins import split_options
from penstock.pipeline.runtime.ledger_follower import LedgerState
from penstock.pipeline.runtime.registration.run_registry import KEY_FILE, Registration, make_key, registration, write
from penstock.pipeline.runtime.topic_reader import scan
from penstock.topics.catalogue import RUNS_TOPIC, control_topics_of, topic_name, topics_of
from penstock.topics.runs import RunRecord
from penstock.topics.wire.secrets import without_password

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
    """(key, value) for all user code in a configuration: functions, commands, services, pickled states.

    `sections`: only those that a command executes, all if empty. `overridden`: keys whose values the operator has passed to the command.
    """
    named = dict.fromkeys(_named(config))
    recorded = [name for name in named if not any(name[0] == key or name[0].startswith(f"{key}.") for key in overridden)]
    return [name for name in recorded if not sections or name[0].partition(".")[0] in sections]


def keys_of(overrides: Iterable[str]) -> list[str]:
    """The keys in `--set KEY=VALUE` texts."""
    return [text.partition("=")[0].strip() for text in overrides]


def _named(config: Config) -> Iterator[Named]:
    """(key, value) for each value of a configuration that may be user code."""
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
    """True for an environment that no package provides; `gymnasium:MODULE:ID` imports a module."""
    plain, options = split_options(source)
    scheme, _, name = plain.partition(":")
    return scheme not in GAME_SCHEMES or ":" in name or any(_names_code(option, value) for option, value in options.items())


def _names_code(option: str, value: Any, *, choices: Collection[str] | None = None) -> bool:
    """True for an engine option whose value may name a module, class or file, or make a library execute code from a model's folder.

    `choices`: the options whose texts are choices of the library itself; None if the texts of all options are.
    """
    if isinstance(value, dict):
        return any(_names_code(str(name), inner, choices=choices) for name, inner in value.items())
    if isinstance(value, list | tuple):
        return any(_names_code(option, inner, choices=choices) for inner in value)
    if isinstance(value, str):
        return option == TRUSTING or any(sign in value for sign in ".:/") or (choices is not None and option not in choices)
    return option == TRUSTING and bool(value)


SHOWN_CHARACTERS = 1000
MLFLOW_SECRETS = ("MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_PASSWORD")
Notify = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trust:
    """The operator's decision on whether code of a run may be executed."""

    run_key: Path | None = None
    """File with the run's key; the one in the state directory, if there is one, without it."""
    code: bool = False
    """True to run code that no key of this machine signed."""

    def arguments(self) -> list[str]:
        """The decision as options of a worker's command line."""
        return [*(["--run-key", str(self.run_key)] if self.run_key else []), *(["--trust-code"] if self.code else [])]


NO_TRUST = Trust()
"""The operator has named no key and trusts no code."""


def require_trusted(registered: Registration, *, trust: Trust, notify: Notify, code: Collection[Named] | None = None) -> RunRecord:
    """Return the run's record if this process may execute its configuration; raises `ConfigError` otherwise.

    `code`: what of the configuration would be executed, all of its code if None.
    """
    run = registered.run
    if registered.ignored:
        offsets = ", ".join(map(str, registered.ignored[:5])) + (", …" if len(registered.ignored) > 5 else "")
        notify(f"{run}.run: ignoring {len(registered.ignored)} records that the run's key did not sign, at offsets {offsets}")
    if code is not None and not code and registered.record is not None and not registered.own:
        return registered.record  # an archive of an earlier release, of which nothing is executed
    record = require_own(registered)
    if registered.keyed and not registered.signed and not trust.code:
        raise ConfigError(f"run {run}: the run's key has signed no record of {run}.run. Inspect and sign it: penstock topics adopt {run}")
    named: Collection[Named] = ()
    if not registered.signed and not trust.code:
        named = user_code(from_json(record.config)) if code is None else code
    if named:
        notify(as_block(run, named))
        raise ConfigError(
            f"run {run} would execute code that no key on this machine has signed: copy runs/{run}/{KEY_FILE} from the machine that "
            "created the run (penstock worker --run-key FILE), or pass --trust-code to execute the code shown above"
        )
    return record


def require_own_server(registered: Registration, config: Config, *, trust: Trust) -> None:
    """Raise `ConfigError` if MLflow credentials would be sent to a server that only an unsigned record names."""
    uri, secrets = config.mlflow.tracking_uri or "", [name for name in MLFLOW_SECRETS if os.environ.get(name)]
    if registered.signed or trust.code or not secrets or not config.mlflow.enabled or not uri.lower().startswith(("http:", "https:")):
        return
    if uri != os.environ.get("MLFLOW_TRACKING_URI"):
        raise ConfigError(
            f"run {registered.run}: mlflow.tracking_uri = {without_password(uri)!r}, which no key on this machine has signed, would "
            f"receive {secrets[0]}: set MLFLOW_TRACKING_URI to it if you trust it, unset {secrets[0]}, or pass --run-key or --trust-code"
        )


def require_own(registered: Registration) -> RunRecord:
    """The run's record from its own topic. Raises `ConfigError` if there is none."""
    run = registered.run
    if registered.record is None:
        raise RunNotFound(run)
    if not registered.own:
        raise ConfigError(
            f"run {run} has no signed configuration in {run}.run: if you created it with an earlier release, inspect and sign it "
            f"with `penstock topics adopt {run}`"
        )
    return registered.record


def as_block(run: str, named: Collection[Named]) -> str:
    """The code that a run would execute, as text with one line for each key, with control characters escaped."""
    width = max((len(key) for key, _ in named), default=0)
    return "\n".join([f"run {run} would execute this code:", *(f"  {_visible(key):<{width}}  {_visible(text)}" for key, text in named)])


def _visible(text: str) -> str:
    shown = "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in text[:SHOWN_CHARACTERS])
    return shown if len(text) <= SHOWN_CHARACTERS else f"{shown} … and {len(text) - SHOWN_CHARACTERS} more characters"


def shown(log: Log, run: str) -> str | None:
    """Text to inspect before signing: the run's code and the topic it comes from; None if the key has already signed it."""
    if registration(log, run).signed:
        return None
    record, topic = _record(log, run)
    config = from_json(record.config)
    code = user_code(config)
    text = as_block(run, code) if code else f"run {run} executes no user code"
    return f"{text}\nfrom {topic}; model {config.model.path!r}, data {', '.join(map(repr, config.data_sources))}"


def adopt_run(log: Log, run: str) -> None:
    """Create the run's key on this machine, and write the run's record, signed. Raises `ConfigError`."""
    (record, _), own = _record(log, run), topic_name(run, "run")
    from_json(record.config)  # a configuration that this release cannot read is not signed
    make_key(run)
    log.create_topics({own: topics_of(run, partitions=1)[own], **control_topics_of(run)})
    write(log, record)


def _record(log: Log, run: str) -> tuple[RunRecord, str]:
    """(the run's record, Kafka name of its topic): from the run's own topic, or from its ledger, which users of other runs cannot write to.

    For a run of an earlier release whose trainer has never started it comes from the register.
    """
    registered = registration(log, run)
    if registered.record is None:
        raise RunNotFound(run)
    if registered.own:
        return registered.record, topic_name(run, "run")
    ledger_state = LedgerState(run)
    ledger_state.apply_usable(scan(log, topic_name(run, "ledger")))
    if ledger_state.opened is None:
        return registered.record, RUNS_TOPIC
    details = json.loads(ledger_state.opened.details or "{}")
    if not all(isinstance(details.get(name), dict) for name in ("config", "info")):
        raise ConfigError(f"the first entry of {run}.ledger has no configuration, so the run cannot be signed")
    return replace(registered.record, config=json.dumps(details["config"]), info=json.dumps(details["info"])), topic_name(run, "ledger")
