"""`penstock.launch`: the launcher called from a program. The rule: it does what `penstock run` does and prints nothing on stdout."""

import sys
from collections.abc import Sequence
from os import PathLike
from typing import Any

from penstock.pipeline.config.load import Config, load, override
from penstock.pipeline.launch import launcher
from penstock.pipeline.launch.check.preflight import check
from penstock.pipeline.launch.create import create
from penstock.pipeline.launch.gpu_placement import visible_gpus
from penstock.pipeline.observe.report.summary import collect


def say(text: str) -> None:
    """A line on the way, on stderr."""
    print(text, file=sys.stderr, flush=True)


def see_through(config: str | PathLike[str] | Config, *, overrides: Sequence[str], run_id: str | None) -> dict[str, Any]:
    """Create a run, attend it to its end, and report on it from the log. Raises as `penstock.launch`."""
    loaded = override(config, overrides) if isinstance(config, Config) else load(str(config), overrides, gpus=len(visible_gpus()))
    checked = check(loaded, tell=lambda _name, _text: None, samples=False, say=say)
    log = launcher.connect(loaded.kafka, say=say)
    try:
        record = create(loaded, log=log, run_id=run_id, checked=checked.info, say=say)
        if launcher.watch(log, record, loaded, say=say, live=False, quiet=True) != 0:
            raise KeyboardInterrupt
        return collect(log, record.run)
    finally:
        log.close()
