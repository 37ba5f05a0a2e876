"""A run's results: its report as text and JSON, its configuration and its page, and its checkpoints for MLflow's registry."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.infra.mlflow.tracking import ModelVersion, RegisteredCheckpoints
from penstock.pipeline.inspect.report.summary import REPORTS
from penstock.pipeline.inspect.report.text import as_text
from penstock.pipeline.inspect.web.build import Limits, build, write
from penstock.pipeline.runtime.factories import open_store
from penstock.pipeline.runtime.session import Session
from penstock.topics.ledger import Entry

PAGE_S, PAGE_STOPPED_S = 20.0, 5.0
"""Time to make the run's page, normally and after a stop request."""
PAGE_TOKENS, PAGE_BYTES = 1_000_000, 10_000_000
"""Limits of the page sent to MLflow, smaller than those of `penstock report --html`."""


def write_report(session: Session, report: Mapping[str, Any], directory: Path) -> list[Path]:
    """Write the files of a report; returns their paths. Raises `OSError`."""
    files = _write_texts(session, report, directory)
    if pages := _write_page(session, report, directory / "report.html"):
        files = _write_texts(session, report, directory) + pages  # again: the text names the page
    return files


def _write_texts(session: Session, report: Mapping[str, Any], directory: Path) -> list[Path]:
    """Write the configuration and the report as text and JSON, each file at once; returns their paths."""
    config = json.loads(session.record.config)
    as_lines, as_data = REPORTS
    contents = {
        "config.json": json.dumps(config, indent=2),
        as_data: json.dumps(report, indent=2),
        as_lines: as_text(report, directory=directory, full=True),
    }
    for name, text in contents.items():
        unfinished = directory / f".{name}.tmp"
        unfinished.write_text(text + "\n" if not text.endswith("\n") else text, encoding="utf-8")
        unfinished.replace(directory / name)
    return [directory / name for name in contents]


def _write_page(session: Session, report: Mapping[str, Any], path: Path) -> list[Path]:
    """Write the run's page within a time limit; returns its path, or nothing after logging why it failed."""
    limits = Limits(tokens=PAGE_TOKENS, max_bytes=PAGE_BYTES, seconds=PAGE_STOPPED_S if session.stop.is_set() else PAGE_S)
    mlflow = {name: report[name] for name in ("mlflow_run_id", "mlflow_uri")}
    try:
        write(build(session.log, session.run, limits=limits, mlflow=mlflow, alive=session.reporter.status), path)
    except Exception as error:  # the page is optional: no error changes the end of the run
        cause = " ".join(str(error).split()) or type(error).__name__
        session.reporter.notify(f"the report page was not written: {cause}; write it with `penstock report {session.run} --html {path}`")
        return []
    return [path]


MODEL = "model"


@dataclass(slots=True)
class CheckpointHistory:
    """Ledger entries of the checkpoints, for MLflow's model registry."""

    session: Session
    _tags: dict[int, dict[str, str]] = field(default_factory=dict)

    def note(self, entry: Entry, *, offset: int) -> None:
        if entry.step is not None:
            self._tags[entry.step] = {
                "penstock.run": self.session.run,
                "penstock.version": str(entry.version),
                "penstock.ledger_offset": str(offset),
                "penstock.digest": str(entry.digest),
            }

    def existing(self) -> RegisteredCheckpoints:
        """The checkpoints that exist now, each with its Hugging Face model if the run exports one."""
        store = open_store(self.session.config, self.session.run, to_read=True) if self._tags else None
        if store is None:
            return RegisteredCheckpoints()
        steps = sorted(step for step in store.steps() if step in self._tags)
        folders = {step: store.path(step) / MODEL for step in steps}
        versions = tuple(
            ModelVersion(step=step, directory=folder if folder.is_dir() else folder.parent, tags=self._tags[step])
            for step, folder in folders.items()
        )
        best = store.best.steps if store.best is not None and store.best.steps in folders else None
        return RegisteredCheckpoints(versions=versions, best=best)
