"""Whether a long run's weights cost more than a short one's: disk, the broker's descriptors and a joiner's memory.

    python benchmarks/weight_history.py --versions 200 2000

Publishes versions of a small model with the trainer's writer under `weights.keep = "chain"` through an embedded broker of its own, each
1 % different from the one before. At each of the numbers given it measures the disk that the topic takes, the most during the last
hundred versions, five a second, and what is left a little later, the files that the broker has open or mapped, and a worker that joins:
its memory, the chunks it reads, the manifests it keeps, its time. Disk is freed by whole segments of each partition: with so small a
model the default of 8 partitions would still fill its first segments after 200 versions. Before that a worker joins at version 57, and
must read one whole version and 17 deltas. Ends with 1 when the last figure is more than 1.2 times the first, or the joiner has read
anything else.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from penstock.infra.broker import embedded
from penstock.infra.kafka.log import KafkaLog
from penstock.infra.tensors.stream import TensorBytes
from penstock.pipeline.config.load import from_table
from penstock.pipeline.data.tiny.model import make_tiny_model
from penstock.pipeline.launch.create import create
from penstock.pipeline.learner.policy_trainer import Weights
from penstock.pipeline.runtime.ledger_follower import LedgerState
from penstock.pipeline.runtime.session import join
from penstock.pipeline.runtime.weights.prefetch import WeightPrefetch
from penstock.workers.trainer.run_writer import RunWriter

RUN, JOINED_AT, RATIO_LIMIT, SETTLE_S, CHANGED = "history", 57, 1.2, 12.0, 0.01
PACE_S = 0.2
"""Between the last hundred versions: the broker deletes every 5 s, so that the disk also holds what is published in that time."""


def work_as_joiner(bootstrap: str, version: int) -> None:
    """A joiner's process: prints what it took to get to a version."""
    from penstock.pipeline.runtime.weights.read import ChunkReader

    chunks = list[tuple[int, int]]()
    check = ChunkReader.checked

    def checked(self: ChunkReader, *given: Any) -> Any:
        chunk = check(self, *given)
        chunks.append((chunk.version, len(chunk.data)))
        return chunk

    ChunkReader.checked = checked  # type: ignore[method-assign]
    log, before, began = KafkaLog(bootstrap, client_id="joiner"), peak_mib(), time.monotonic()
    prefetch = WeightPrefetch(log, RUN)
    while prefetch.version < version:
        prefetch.wait(1.0)
    print(
        json.dumps(
            {
                "seconds": time.monotonic() - began,
                "memory_mib": peak_mib() - before,
                "versions": sorted({version for version, _ in chunks}),
                "chunks": len(chunks),
                "bytes": sum(size for _, size in chunks),
                "manifests": len(prefetch.state.manifests),
            }
        )
    )
    prefetch.close()


def peak_mib() -> float:
    """The most memory that this process has had."""
    (line,) = [line for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) / 1024


class Trainer:
    """The writer of a trainer that computes nothing."""

    def __init__(self, log: KafkaLog, home: Path, nbytes: int, bootstrap: str, *, partitions: int) -> None:
        model = make_tiny_model(home / "model", steps=0)
        table: dict[str, Any] = {
            "run": {"steps": 1_000_000},
            "model": {"path": str(model)},
            "data": {"source": "tiny:successor", "size": 64, "max_prompt_tokens": 32},
            "reward": {"functions": ["exact_match"]},
            "schedule": {"mode": "in_flight", "prompts_per_step": 1, "samples_per_prompt": 2},
            "rollout": {"engine": "toy", "workers": 1},
            "trainer": {"export": False, "checkpoint_every": 0},
            "weights": {"keep": "chain", "partitions": partitions},
            "kafka": {"bootstrap": bootstrap},
            "mlflow": {"enabled": False},
        }
        create(from_table(table), log=log, run_id=RUN, notify=lambda _: None)
        session = join(run=RUN, role="trainer", log=log, worker="trainer", model=None, stop=threading.Event())
        assert session is not None
        self._writer = RunWriter(session, session.transactions(), LedgerState(RUN))
        self._writer.write("run-opened", details="{}")
        self._rng, self.version = np.random.default_rng(0), -1
        self._flat = self._rng.integers(0, 2**16, nbytes // 2, dtype=np.uint16)

    def publish_to(self, version: int, home: Path) -> float:
        """Publish all versions up to this one; returns the most that the chunks have taken on disk during the last hundred, in MB."""
        most = 0.0
        while self.version < version:
            if self.version > version - 100:
                time.sleep(PACE_S)
                most = max(most, disk_mb(home)[0])
            self.version += 1
            self._flat = self._flat.copy()
            self._flat[self._rng.integers(0, len(self._flat), int(len(self._flat) * CHANGED))] ^= 1
            self._writer.publish(Weights(partial(_tensors, self._flat)), version=self.version, step=self.version)
            self._writer.finish_publishing()
        return most

    def chain_bytes(self, version: int) -> int:
        """Bytes of what a version is put together from."""
        manifests = self._writer.state.manifests
        return sum(manifests[number].nbytes for number in range(version - version % 20, version + 1))


def _tensors(flat: np.ndarray) -> list[TensorBytes]:
    return [TensorBytes(name="tensor", dtype="bfloat16", shape=flat.shape, data=memoryview(flat).cast("B"))]


def disk_mb(home: Path) -> tuple[float, float]:
    """What the topic's chunks take on disk, and its manifests."""
    chunks, manifests = 0, 0
    for path in (home / "broker").rglob(f"{RUN}.weights-*/*"):
        with contextlib.suppress(FileNotFoundError):  # it was just deleted
            if path.parent.name == f"{RUN}.weights-0":
                manifests += path.stat().st_blocks * 512
            else:
                chunks += path.stat().st_blocks * 512
    return chunks / 1e6, manifests / 1e6


def joined(bootstrap: str, version: int) -> dict[str, Any]:
    """What a worker in a process of its own takes to join."""
    command = [sys.executable, __file__, "--as-joiner", bootstrap, str(version)]
    answer: dict[str, Any] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    return answer


def measure(home: Path, bootstrap: str, trainer: Trainer) -> dict[str, float]:
    """The figures at the version that is out."""
    time.sleep(SETTLE_S)  # the broker looks every 5 s for what it may delete, and keeps it for a second
    pid = embedded.status(home).pid
    descriptors = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    mapped = sum(".index" in line or ".timeindex" in line for line in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8").splitlines())
    answer = joined(bootstrap, trainer.version)
    chunks, manifests = disk_mb(home)
    return {
        "chunks on disk at rest [MB]": chunks,
        "manifests on disk [MB]": manifests,
        "the broker's descriptors": descriptors,
        "the broker's mapped indexes": mapped,
        "a joiner's memory [MiB]": answer["memory_mib"],
        "manifests it keeps": answer["manifests"],
        "bytes of chunks it reads [MB]": answer["bytes"] / 1e6,
        "seconds it takes": answer["seconds"],
    }


def main() -> int:
    """Measure, print, and fail beyond a limit."""
    if sys.argv[1:2] == ["--as-joiner"]:
        work_as_joiner(sys.argv[2], int(sys.argv[3]))
        return 0
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--versions", type=int, nargs=2, default=[200, 2000])
    parser.add_argument("--mib", type=int, default=8, help="size of a version")
    parser.add_argument("--partitions", type=int, default=1, help="weights.partitions")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="penstock-history-") as place:
        home = Path(place)
        os.environ["PENSTOCK_HOME"] = place
        try:
            bootstrap = embedded.start(home=home).bootstrap
            log = KafkaLog(bootstrap)
            trainer = Trainer(log, home, chosen.mib << 20, bootstrap, partitions=chosen.partitions)
            trainer.publish_to(JOINED_AT, home)
            late, chain = joined(bootstrap, JOINED_AT), trainer.chain_bytes(JOINED_AT)
            figures = []
            for versions in chosen.versions:
                most = trainer.publish_to(versions - 1, home)
                figures.append({"most chunks on disk [MB]": most, **measure(home, bootstrap, trainer)})
            log.close()
        finally:
            embedded.stop(home)
    print(f"a joiner at version {JOINED_AT} reads versions {late['versions']}: {late['chunks']} chunks, {late['bytes']} bytes of {chain}")
    least, most = chosen.versions
    print(f"{'after versions':<32}{least:>10}{most:>10}{'ratio':>8}")
    for name, before in figures[0].items():
        print(f"{name:<32}{before:>10.1f}{figures[1][name]:>10.1f}{figures[1][name] / before:>8.2f}")
    held = ("most chunks on disk [MB]", "the broker's descriptors", "the broker's mapped indexes", "a joiner's memory [MiB]")
    grown = [name for name in held if figures[1][name] > RATIO_LIMIT * figures[0][name]]
    exact = late["versions"] == list(range(40, JOINED_AT + 1)) and late["bytes"] == chain
    return int(bool(grown) or not exact)


if __name__ == "__main__":
    sys.exit(main())
