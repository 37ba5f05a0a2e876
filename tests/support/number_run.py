"""A run whose model is one number, on the in-memory log: the trainer's half of a run in milliseconds."""

import json
import struct
import threading
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from penstock.infra.backends.base import StepResult, TokenBatch
from penstock.infra.memory.log import MemoryLog
from penstock.infra.tensors.stream import TensorBytes
from penstock.pipeline.config.load import Config, from_table, to_json
from penstock.pipeline.runtime.session import Session
from penstock.topics import groups
from penstock.topics.groups import Group
from penstock.topics.runs import RunRecord
from penstock.topics.wire.record import Outgoing
from tests.support import page_records
from tests.support.a_run import RecordBuilder, with_group
from tests.support.least_config import merged

RUN, STEPS = "numbers", 4


class NumberBackend:
    """Adds each batch's advantages, weighed by its tokens, to one number; equal batches give equal bits."""

    divides_late = True
    shares_prompts = False
    saves_in_background = True

    def __init__(self, *, drift: float = 0.0, told: float | None = None, device: str = "cpu") -> None:
        """`drift` is what another machine's arithmetic would add to each step; its fingerprint says `told` if that is given."""
        self.value, self.steps, self.drift, self.told = 1.0, 0, drift, drift if told is None else told
        self.device = device
        self.snapshots: list[float] = []
        self.copies = 0
        self.closed = False
        self._gradient = 0.0

    def backward(self, batch: TokenBatch, _loss: Any, *, denominator: float | None = None) -> dict[str, float]:
        self._gradient += float((batch.advantages * batch.groups).sum()) + float(batch.input_ids.sum())
        tokens = float(batch.completion_mask.sum())
        return {"tokens": tokens, "loss_sum": self._gradient, "denominator": tokens}

    def step(self, *, denominator: float) -> StepResult:
        norm = self._gradient / denominator
        self.value, self.steps, self._gradient = self.value * 0.5 + norm + self.drift, self.steps + 1, 0.0
        return StepResult(grad_norm=norm, lr=0.1)

    def weights(self) -> list[TensorBytes]:
        self.copies += 1
        return [TensorBytes(name="number", dtype="float64", shape=(1,), data=struct.pack("<d", self.value))]

    def adapted(self) -> None:
        return None

    def load_weights(self, tensors: Iterable[TensorBytes]) -> None:
        (self.value,) = (struct.unpack("<d", bytes(tensor.data))[0] for tensor in tensors)

    def take_snapshot(self, tensors: Iterable[TensorBytes] | None = None) -> None:
        values = None if tensors is None else [struct.unpack("<d", bytes(tensor.data))[0] for tensor in tensors]
        self.snapshots.append(self.value if values is None else values[0])

    def snapshot_logprobs(self, batch: TokenBatch) -> Any:
        return batch.behaviour_logprobs

    def save(self, directory: str | Path) -> None:
        Path(directory, "number.json").write_text(json.dumps([self.value, self.steps]), encoding="utf-8")

    def load(self, directory: str | Path) -> None:
        self.value, self.steps = json.loads(Path(directory, "number.json").read_text(encoding="utf-8"))

    def fingerprint(self) -> dict[str, str | int]:
        return {"drift": str(self.told), "device": self.device}

    def close(self) -> None:
        self.closed = True


def config_of(checkpoints: Path | None = None, **sections: dict[str, Any]) -> Config:
    """Two groups a step and a version a step; checkpoints after every second step, where there is a directory."""
    trainer = {"export": False, "checkpoint_every": 2 if checkpoints else 0, "checkpoint_dir": str(checkpoints) if checkpoints else None}
    table: dict[str, Any] = {
        "run": {"steps": STEPS, "seed": 7},
        "model": {"path": "none"},
        "data": {"source": "none.jsonl"},
        "schedule": {"mode": "one_step_off", "prompts_per_step": 2, "samples_per_prompt": 4, "max_lag": STEPS},
        "trainer": trainer,
        "rollout": {"workers": 1},
        "kafka": {"partitions": 1},
        "mlflow": {"enabled": False},
    }
    return from_table(merged(table, sections))


def log_with(found: Iterable[Group] = ()) -> MemoryLog:
    """A log with the run's topics and these groups."""
    empty = Outgoing(topic=f"{RUN}.groups", partition=0, key=b"0", headers=(), value=b"")
    sent = [part for group in found for part in with_group(replace(empty, key=str(group.group).encode()), group, run=RUN)]
    return page_records.log_with(sent, RUN)


def scored(count: int, *, outcome: str = "scored") -> list[Group]:
    """Groups with different rewards, drawn under version 0."""
    builder = RecordBuilder()
    rewards = [[float(np.sin(number)), 0.0, 1.0, 0.5] for number in range(count)]
    return [groups.decode(builder.group(row, version=0, outcome=outcome)[-1].value) for row in rewards]


def session_of(log: MemoryLog, config: Config, *, role: str = "trainer") -> Session:
    """A worker's place in the run."""
    record = RunRecord(run=RUN, status="created", config=to_json(config), info="{}", created_ns=0, updated_ns=0)
    info = {"steps": config.run.steps, "digests": {"stop_ids": [2]}}
    return Session(run=RUN, role=role, worker=role, log=log, record=record, config=config, info=info, stop=threading.Event())
