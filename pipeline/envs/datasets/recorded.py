"""Data sets in a run's record, and the comparison of their digests with the current rows."""

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.infra.errors import ConfigError
from penstock.pipeline.envs.datasets.rows import Dataset


def described(sources: Sequence[str], opened: Mapping[str, Dataset], *, context: str) -> list[dict[str, Any]]:
    """The description of data sets for the record; `context` is training or evaluation."""
    return [
        {"name": name, "source": source, "digest": rows.digest, "rows": len(rows), "context": context}
        for source, (name, rows) in zip(sources, opened.items(), strict=True)
    ]


def refuse_changed(info: Mapping[str, Any], sources: Sequence[str], opened: Mapping[str, Dataset], *, context: str, run: str) -> None:
    """Raise `ConfigError` with the source and both digests if the rows differ from those in the record's `info`."""
    recorded = {row["source"]: row for row in info.get("data", ()) if row["context"] == context}
    for row in described(sources, opened, context=context):
        before = recorded.get(row["source"], row)
        if before["digest"] != row["digest"]:
            raise ConfigError(
                f"{'data' if context == 'training' else 'eval'}.source: the rows of {row['source']} have changed since the run's start: "
                f"{before['rows']:,} rows with digest {before['digest'][:12]} then, {row['rows']:,} with {row['digest'][:12]} here; "
                f"restore the old rows, or continue with these: penstock run --resume {run} --set data.on_change=accept"
            )
