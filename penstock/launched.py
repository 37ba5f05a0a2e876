"""`penstock.launch`: runs a configuration as `penstock run` does, without output on stdout."""

import hashlib
import inspect
import json
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from penstock.infra.backends.hardware import this_cpu, visible_gpus
from penstock.infra.paths import state_directory
from penstock.pipeline.config.load import Config, ConfigError, from_table, load, override, to_json, with_paths
from penstock.pipeline.config.security import refuse_secrets
from penstock.pipeline.inspect.live.view import notebook_screen
from penstock.pipeline.inspect.report.summary import collect
from penstock.pipeline.launch import launcher
from penstock.pipeline.launch.broker_keeper import connect
from penstock.pipeline.launch.check.preflight import check
from penstock.pipeline.launch.create import create
from penstock.topics.wire.visible import visible


def notify(text: str) -> None:
    """A line on the way, on stderr."""
    print(visible(text), file=sys.stderr, flush=True)


def configured(
    config: str | PathLike[str] | Mapping[str, Mapping[str, Any]] | Config, overrides: Sequence[str], reward: Callable[..., Any] | None
) -> Config:
    """The configuration of a file, of tables or of an object, with a reward that is a function. Raises `ConfigError`."""
    named = [] if reward is None else [f"reward.functions={json.dumps([spec_of(reward)])}"]
    if isinstance(config, Mapping | Config):
        made = config if isinstance(config, Config) else from_table(with_paths(config, Path.cwd()))
        refuse_secrets(json.loads(to_json(made)))
        return override(made, [*overrides, *named])
    return load(str(config), [*overrides, *named], gpus=len(visible_gpus()), cpu=this_cpu())


def spec_of(function: Callable[..., Any]) -> str:
    """A function as `file.py:function`; a notebook's by a file with its source. Raises `ConfigError` if it is nested, or has no source."""
    name, path = getattr(function, "__qualname__", ""), inspect.getsourcefile(function) if inspect.isfunction(function) else None
    if not name.isidentifier():
        raise ConfigError(f"reward: {name or function!r} is no function at the top of a module or a notebook's cell; define it there")
    if function.__module__ != "__main__" and path is not None and Path(path).is_file():
        return f"{Path(path).resolve()}:{name}"
    try:
        source = textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError) as error:
        raise ConfigError(f"reward: there is no source of {name} here; write it to a file and name it file.py:{name}") from error
    digest = hashlib.sha256(source.encode()).hexdigest()
    file = state_directory() / "functions" / f"{digest[:16]}.py"
    file.parent.mkdir(exist_ok=True)
    file.write_text(source, encoding="utf-8")
    return f"{file}:{name}"


def see_through(
    config: str | PathLike[str] | Mapping[str, Mapping[str, Any]] | Config,
    *,
    overrides: Sequence[str],
    run_id: str | None,
    reward: Callable[..., Any] | None = None,
) -> dict[str, Any]:
    """Create a run, attend it to its end, and report on it from the log. Raises as `penstock.launch`."""
    loaded = configured(config, overrides, reward)
    checked = check(loaded, tell=lambda _name, _text: None, samples=False, notify=notify)
    log = connect(loaded.kafka.bootstrap, loaded.kafka.security, notify=notify)
    try:
        record = create(loaded, log=log, run_id=run_id, checked=checked.info, notify=notify)
        if launcher.watch(log, record, loaded, notify=notify, live=False, quiet=True, screen=notebook_screen()) != 0:
            raise KeyboardInterrupt
        return collect(log, record.run)
    finally:
        log.close()
