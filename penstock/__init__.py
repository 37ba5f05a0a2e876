"""Python interface: start a run, open one, and read its records as Arrow tables.

`import penstock` needs no torch: everything else is imported when it is called.

Example:
    report = penstock.launch("examples/demo.toml", overrides=["run.steps=10"])
    with penstock.open(report["run"]) as run:
        table = run.samples()  # pyarrow
"""

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.opened import Run
    from penstock.pipeline.config.load import Config

__all__ = ["launch", "open"]


def launch(
    config: "str | PathLike[str] | Mapping[str, Mapping[str, Any]] | Config",
    *,
    overrides: Sequence[str] = (),
    run_id: str | None = None,
    reward: Callable[..., Any] | None = None,
) -> dict[str, Any]:
    """See a run through as `penstock run` does, with plain lines on stderr, and return its report: the keys of `report --json`.

    `config` is a file, or its tables as a dict: `{"run": {"steps": 10}, …}`. `overrides` are `"section.key=value"` as in `--set`.
    `reward` is a function in TRL's shape, also one of a notebook: it runs in processes of its own, from its source, so it has to import
    inside of itself what it needs there.

    Raises:
        ConfigError: a mistake in the configuration, in one line.
        PenstockError: the run could not start, or a worker crashed; one line.
        KeyboardInterrupt: the run was stopped; resume it with `penstock run --resume RUN`.
    """
    from penstock.launched import see_through

    return see_through(config, overrides=overrides, run_id=run_id, reward=reward)


def open(run: str, *, bootstrap: str = "embedded", security: dict[str, str] | None = None) -> "Run":
    """Open a run for reading, live or ended; `run` is an id, a unique prefix, `latest`, or an exported run's folder.

    Raises:
        ValueError: no such run, or several.
        LogUnreachable: no broker there.
    """
    from penstock.opened import Run

    return Run.find(run, bootstrap=bootstrap, security=security or {})
