"""The turns of a run's trajectories as an Arrow table, one row a part with one source."""

from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from penstock.infra.log import Log
from penstock.pipeline.runtime.topic_reader import RunReader
from penstock.topics.rollouts import Rollout

TURNS = pa.schema(
    [
        ("group", pa.int64()),
        ("sample", pa.int64()),
        ("turn", pa.int64()),
        ("source", pa.string()),
        ("start", pa.int64()),
        ("end", pa.int64()),
        ("tokens", pa.int64()),
        ("finish", pa.string()),
        ("reward", pa.float64()),
        ("policy_version_min", pa.int64()),
        ("policy_version_max", pa.int64()),
        ("environment", pa.string()),
        ("environment_seed", pa.int64()),
        ("worker", pa.string()),
    ]
)


def turns(log: Log, run: str) -> pa.Table:
    """`TURNS`: every part of every trajectory, in order; versions are null for parts of the environment. Single completions have none."""
    rollouts = {
        (read.payload.group, read.payload.sample): read.payload for read in RunReader(log, run).samples() if read.payload is not None
    }
    rows = [row for _, rollout in sorted(rollouts.items(), key=lambda item: item[0]) for row in _rows(rollout)]
    return pa.Table.from_pylist(rows, schema=TURNS)


def _rows(rollout: Rollout) -> Iterator[dict[str, Any]]:
    versions = rollout.token_versions
    for number, turn in enumerate(rollout.turns or ()):
        own = versions[turn.start : turn.end] if turn.source == "model" else versions[:0]
        yield {
            "group": rollout.group,
            "sample": rollout.sample,
            "turn": number,
            "source": turn.source,
            "start": turn.start,
            "end": turn.end,
            "tokens": turn.end - turn.start,
            "finish": turn.finish,
            "reward": turn.reward,
            "policy_version_min": int(own.min()) if len(own) else None,
            "policy_version_max": int(own.max()) if len(own) else None,
            "environment": rollout.environment,
            "environment_seed": rollout.environment_seed,
            "worker": rollout.worker,
        }
