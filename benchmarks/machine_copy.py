"""What one worker and sixteen workers of a machine read from the broker to get the same weights.

    python benchmarks/machine_copy.py
    python benchmarks/machine_copy.py --readers 1 16 --mib 256 --private

Publishes a whole version of so many MiB and four deltas of 1 % of its elements through an embedded broker in a network namespace of its
own, and starts so many readers, each a process with the rollout worker's prefetch. Counted are the bytes of chunks that they read, the
bytes that the loopback carried meanwhile, and the memory they take together (proportional set size). Then another delta is published;
the reading process is killed with SIGKILL; another delta follows, for which another process has to read. In the end all are killed with
SIGKILL, and what they shared must be gone. Ends with 1 when sixteen read more than 1.05 times what one reads, or anything is left.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import own_network

from penstock.infra.broker import embedded
from penstock.infra.kafka.log import KafkaLog
from penstock.infra.tensors.stream import TensorBytes
from penstock.pipeline.runtime.weights import read
from penstock.pipeline.runtime.weights.prefetch import WeightPrefetch
from penstock.pipeline.runtime.weights.publish import Base, chunk_partitions, manifest_record, send_version
from penstock.topics.catalogue import topics_of

PARTITIONS, CHUNK_BYTES, CHANGED, TENSORS, LIMIT_S, RATIO_LIMIT = 10, 8 << 20, 0.01, 16, 600.0, 1.05


def work_as_reader(run: str, bootstrap: str, *, shared: bool) -> None:
    """A reader's process: for each version named on its input it waits, and prints what it has read so far."""
    counted = {"bytes": 0, "versions": 0}
    bring = read.bring

    def counting(*given: object, **named: object) -> int:
        nbytes = bring(*given, **named)  # type: ignore[arg-type]
        counted["bytes"] += nbytes
        counted["versions"] += 1
        return nbytes

    from penstock.pipeline.runtime.weights import prefetch as weight_prefetch

    weight_prefetch.bring = counting  # type: ignore[assignment]
    log = KafkaLog(bootstrap, client_id=f"reader-{os.getpid()}")
    prefetch = WeightPrefetch(log, run, notify=lambda text: print(text, file=sys.stderr), shared=shared)
    for line in sys.stdin:
        while True:
            with prefetch.taken() as (version, tensors):
                total = sum(int(np.frombuffer(tensor.data, dtype=np.uint8)[:: 1 << 12].sum()) for tensor in tensors)
            if version >= int(line):
                break
            prefetch.wait(0.1)
        print(json.dumps({**counted, "version": version, "sum": total}), flush=True)


class Publisher:
    """Publishes versions of random weights, each 1 % different from the one before."""

    def __init__(self, log: KafkaLog, run: str, nbytes: int) -> None:
        self.run, self.newest, self._rng = run, -1, np.random.default_rng(0)
        log.create_topics(topics_of(run, partitions=1, weight_partitions=PARTITIONS))
        self._producer = log.producer(max_in_flight_bytes=32 << 20, linger_ms=0.0)
        self._now = self._rng.integers(0, 2**16, nbytes // 2, dtype=np.uint16)

    def publish(self) -> int:
        """The next version, the first one whole; returns the bytes of its chunks."""
        before, self._now = self._now, self._now.copy()
        base = None
        if self.newest >= 0:
            self._now[self._rng.integers(0, len(self._now), int(len(self._now) * CHANGED))] ^= 1
            base = Base(version=self.newest, tensors=_tensors(before))
        self.newest += 1
        manifest = send_version(
            self._producer, _tensors(self._now), run=self.run, version=self.newest, step=self.newest, base=base,
            partitions=chunk_partitions(self.newest, count=PARTITIONS), max_bytes=CHUNK_BYTES,
        )  # fmt: skip
        self._producer.send(manifest_record(manifest, run=self.run)).offset(60.0)
        return manifest.nbytes


def _tensors(flat: np.ndarray) -> list[TensorBytes]:
    parts = np.split(flat, TENSORS)
    return [
        TensorBytes(name=f"tensor.{number:02}", dtype="bfloat16", shape=part.shape, data=memoryview(part).cast("B"))
        for number, part in enumerate(parts)
    ]


class Readers:
    """Reader processes of one machine."""

    def __init__(self, count: int, run: str, bootstrap: str, *, private: bool) -> None:
        command = [sys.executable, __file__, "--as-reader", run, bootstrap, *(["--private"] if private else [])]
        self.processes = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, pass_fds=()) for _ in range(count)
        ]

    def reach(self, version: int) -> list[dict[str, int]]:
        """What each has read once all have this version."""
        for process in self.processes:
            print(version, file=process.stdin, flush=True)
        answers = []
        for process in self.processes:
            line = process.stdout.readline() if process.stdout else ""
            if not line:
                raise SystemExit(f"a reader has ended with {process.wait()}")
            answers.append(json.loads(line))
        if len({answer["sum"] for answer in answers}) > 1:
            raise SystemExit(f"readers of version {version} have different weights")
        return answers

    def memory_mib(self) -> float:
        """Memory of all together; what several share counts once."""
        sizes = [Path(f"/proc/{process.pid}/smaps_rollup").read_text(encoding="utf-8") for process in self.processes]
        return sum(int(line.split()[1]) for text in sizes for line in text.splitlines() if line.startswith("Pss:")) / 1024

    def kill(self, index: int) -> None:
        """SIGKILL one."""
        process = self.processes.pop(index)
        process.kill()
        process.communicate()


def shared_by(pids: Iterable[int]) -> set[str]:
    """Inodes of the shared memory that these processes have mapped."""
    inodes = set[str]()
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended meanwhile
            lines = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8").splitlines()
            inodes |= {line.split()[4] for line in lines if "memfd:penstock-weights" in line}
    return inodes


def left_behind(inodes: set[str]) -> list[str]:
    """What of this memory some process still has, and files that might be of it."""
    still = shared_by(int(path.name) for path in Path("/proc").glob("[0-9]*")) & inodes
    return sorted(still) + [str(path) for path in Path("/dev/shm").iterdir() if "penstock" in path.name]


def measure(log: KafkaLog, bootstrap: str, count: int, chosen: argparse.Namespace) -> dict[str, float]:
    """Bytes and memory of so many readers."""
    publisher = Publisher(log, f"machine-{count}", chosen.mib << 20)
    chain = sum(publisher.publish() for _ in range(5))
    began, started = own_network.carried(), time.monotonic()
    readers = Readers(count, publisher.run, bootstrap, private=chosen.private)
    joined = readers.reach(4)
    found = {
        "chain": chain,
        "join_bytes": sum(answer["bytes"] for answer in joined),
        "join_carried": own_network.carried() - began,
        "join_s": time.monotonic() - started,
        "memory_mib": readers.memory_mib(),
    }
    delta = publisher.publish()
    followed = readers.reach(5)
    found["delta"], found["delta_bytes"] = delta, sum(answer["bytes"] for answer in followed) - found["join_bytes"]
    if count > 1:
        reading = next(index for index, answer in enumerate(followed) if answer["bytes"])
        lost = followed[reading]["bytes"]
        readers.kill(reading)
        publisher.publish()
        started = time.monotonic()
        after = readers.reach(6)
        found["takeover_s"] = time.monotonic() - started
        found["takeover_bytes"] = sum(answer["bytes"] for answer in after) - (sum(answer["bytes"] for answer in followed) - lost)
    inodes = shared_by(process.pid for process in readers.processes)
    while readers.processes:
        readers.kill(0)
    if left := left_behind(inodes):
        raise SystemExit(f"left behind: {', '.join(left)}")
    return found


def main() -> int:
    """Measure each number of readers and print."""
    if sys.argv[1:2] == ["--as-reader"]:
        work_as_reader(sys.argv[2], sys.argv[3], shared="--private" not in sys.argv)
        return 0
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--readers", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--mib", type=int, default=128, help="size of a version")
    parser.add_argument("--private", action="store_true", help="each reader on its own, as with weights.shared = false")
    chosen = parser.parse_args()
    own_network.enter()
    with tempfile.TemporaryDirectory(prefix="penstock-machine-") as place:
        try:
            bootstrap = embedded.start(home=Path(place)).bootstrap
            log = KafkaLog(bootstrap)
            found = {count: measure(log, bootstrap, count, chosen) for count in chosen.readers}
            log.close()
        finally:
            embedded.stop(Path(place))
    for count, figures in found.items():
        print(
            f"{count:>2} readers joined in {figures['join_s']:.1f} s: {figures['join_bytes'] / 1e6:.1f} MB of chunks read, of a chain of "
            f"{figures['chain'] / 1e6:.1f} MB; carried {figures['join_carried'] / 1e6:.1f} MB; memory {figures['memory_mib']:.0f} MiB"
        )
        print(f"   next delta of {figures['delta'] / 1e6:.2f} MB: {figures['delta_bytes'] / 1e6:.2f} MB read")
        if count > 1:
            took = figures["takeover_s"]
            print(f"   delta after SIGKILL of the one that read: {figures['takeover_bytes'] / 1e6:.2f} MB, all had it in {took:.1f} s")
    least, most = found[min(found)], found[max(found)]
    ratios = {name: most[name] / least[name] for name in ("join_bytes", "join_carried", "delta_bytes", "memory_mib")}
    print(f"{max(found)} against {min(found)}:", ", ".join(f"{name} {ratio:.3f}" for name, ratio in ratios.items()))
    print(f"nothing is left after SIGKILL of all; load {os.getloadavg()[0]:.1f}")
    return int(not chosen.private and max(ratios["join_bytes"], ratios["delta_bytes"]) > RATIO_LIMIT)


if __name__ == "__main__":
    sys.exit(main())
