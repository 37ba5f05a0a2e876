"""Records that a restarted trainer reads, after few steps and after many.

    python -m benchmarks long_run restart --steps 10 10000

Builds the ledger and the manifests of such a run on the in-memory log, each step's entry as the trainer writes it, and measures seconds and
memory of `read_resumed`, and of `read_ledger_history`, which reads all of it. Status 1 if the time after the most steps is more than 1.2
times that after the fewest: of the reading alone between two runs at the same distance from their checkpoints, and of the reading with
the start of the process and its imports between any two.
"""

import statistics
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Sequence

from benchmarks.support.command import parser_of
from penstock.infra.memory.log import MemoryLog
from penstock.pipeline.learner.ledger_history import read_ledger_history
from penstock.pipeline.scheduling.resume_point import ResumePoint
from penstock.topics import ledger, weights
from penstock.topics.catalogue import topics_of
from penstock.topics.ledger import Entry, Planned
from penstock.topics.weights import Manifest
from penstock.topics.wire.record import Outgoing
from penstock.workers.trainer.resuming import ResumeOffsets, read_resumed

RUN, GROUPS, EVERY, PARTITIONS = "long", 8, 50, 32
RATIO_LIMIT, ROUNDS = 1.2, 7


def built(steps: int) -> MemoryLog:
    """The ledger and partition 0 of `weights` of a run that publishes a version at each step and has a checkpoint at every 50th."""
    log = MemoryLog()
    log.create_topics(topics_of(RUN, partitions=PARTITIONS))
    producer, places, offset, seq = log.producer(), ResumeOffsets(), 0, -1

    def enter(kind: ledger.EntryKind, **fields: object) -> None:
        nonlocal offset, seq
        seq += 1
        entry = Entry(seq=seq, kind=kind, time_ns=seq, **fields)  # type: ignore[arg-type]
        value = ledger.encode(entry)
        headers = ledger.headers(entry, run=RUN).encode(value)
        offset = producer.send(Outgoing(topic=f"{RUN}.ledger", partition=0, key=None, headers=headers, value=value)).offset()

    def publish(version: int) -> None:
        manifest = Manifest(
            version=version, step=version, encoding="full", names=("w",), dtypes=("float32",), shapes=((4,),), nbytes=16, digest="d" * 64,
            chunk_partitions=(1,), chunk_offsets=(version,), chunk_sizes=(16,), chunk_sha256=("c" * 64,), base_version=None, created_ns=1,
        )  # fmt: skip
        value = weights.encode(manifest)
        headers = weights.headers(manifest, run=RUN).encode(value)
        places.anchors[version] = producer.send(
            Outgoing(topic=f"{RUN}.weights", partition=0, key=None, headers=headers, value=value)
        ).offset()
        enter("version", version=version, step=version, digest=manifest.digest)

    enter("run-opened", details="{}")
    publish(0)
    for step in range(steps):
        first, saved = step * GROUPS, list(range(step - step % EVERY, 0, -EVERY))[:2]
        checkpoints = places.checkpoints(saved)
        version, manifests = places.anchor(checkpoints[-1][0] if checkpoints else 0)
        mark = ResumePoint(
            below=first + GROUPS, settled=(), drops=0, dropped=0, checkpoints=checkpoints, manifests=manifests, version=version,
            rebased=None,
            positions={f"groups/{partition}": first // PARTITIONS for partition in range(PARTITIONS)},
        )  # fmt: skip
        plan = tuple(Planned(group=first + n, sha256="a" * 64, partition=n, offset=step) for n in range(GROUPS))
        measured = {f"measure_{n}": float(n) for n in range(40)} | {"dropped": 0.0}
        enter("step", step=step, version=step, plan=plan, loss_bits=1, grad_norm_bits=1, metrics=measured, details=mark.to_json())
        places.steps[step + 1] = offset
        publish(step + 1)
        if (step + 1) % EVERY == 0:
            enter("checkpoint", step=step + 1, version=step + 1, digest="d" * 64)
    return log


def measured(read: Callable[[], object]) -> tuple[float, float]:
    """(median seconds, MiB held by what was read)."""
    seconds = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        read()
        seconds.append(time.perf_counter() - began)
    tracemalloc.start()
    kept = read()
    held = tracemalloc.get_traced_memory()[0] / 2**20
    tracemalloc.stop()
    del kept
    return statistics.median(seconds), held


def started() -> float:
    """Seconds until a trainer's process has what it needs before it reads."""
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", "import torch, transformers, penstock.workers.trainer.worker"], check=True)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def main(arguments: Sequence[str]) -> int:
    """Build, measure in turn, compare."""
    parser = parser_of(__name__, __doc__)
    parser.add_argument("--steps", type=int, nargs="+", default=[10, 10_000])
    chosen = parser.parse_args(arguments)
    # Both are half way behind a checkpoint, with an older one before it: that decides what is repeated, not the length of the run.
    half, most = EVERY // 2, max(chosen.steps)
    lengths = {*chosen.steps, 3 * EVERY + half, most // EVERY * EVERY + half}
    took = {}
    print(f"{'steps':>8}{'resumed s':>12}{'MiB':>8}{'all s':>10}{'MiB':>8}")
    for steps in sorted(lengths):
        log, saved = built(steps), list(range(steps - steps % EVERY, 0, -EVERY))[:2]
        resumed, held = measured(lambda log=log, saved=saved: read_resumed(log, RUN, saved=saved))  # type: ignore[misc]
        whole, all_held = measured(lambda log=log: read_ledger_history(log, RUN))  # type: ignore[misc]
        took[steps] = resumed
        print(f"{steps:>8}{resumed:>12.4f}{held:>8.2f}{whole:>10.4f}{all_held:>8.2f}", flush=True)
    equally_far = sorted(steps for steps in took if steps > 2 * EVERY and steps % EVERY == half)
    ratio = took[equally_far[-1]] / took[equally_far[0]]
    print(f"after {equally_far[-1]} steps {ratio:.2f} times as long as after {equally_far[0]}; at most {RATIO_LIMIT}")
    start = started()
    whole_ratio = (start + took[max(took)]) / (start + took[min(took)])
    print(f"with {start:.1f} s of start: after {max(took)} steps {whole_ratio:.2f} times as long as after {min(took)}")
    return int(max(ratio, whole_ratio) > RATIO_LIMIT)
