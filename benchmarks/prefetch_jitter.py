"""Whether an engine keeps its pace while a version comes in: one process draws, fetches, checks and copies.

    python benchmarks/prefetch_jitter.py --gigabytes 1

The toy engine's decode step takes 5 ms and does nothing else; a version of random bfloat16 weights comes through an embedded broker of its
own, fetched by the thread that fetches it in a rollout worker. What a step takes is measured before the version is there and while it
comes: the difference is what the interpreter's lock and the cores cost an engine in the worker's own process
(`rollout.engine_process = false`).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from penstock.infra.broker import embedded
from penstock.infra.engines.base import GroupRequest, Sampling
from penstock.infra.engines.toy import ToyEngine
from penstock.infra.kafka.log import KafkaLog
from penstock.infra.tensors.stream import TensorBytes
from penstock.pipeline.runtime.weights.prefetch import WeightPrefetch
from penstock.pipeline.runtime.weights.publish import chunk_partitions, manifest_record, send_version
from penstock.topics.catalogue import topics_of

RUN, PARTITIONS, CHUNK_BYTES, TENSORS = "jitter", 10, 8 << 20, 64
STEP_S, BEFORE_S = 0.005, 4.0


def draw(bootstrap: str) -> None:
    """Draw for a while, say so, and draw on until the version is here; print what steps took, as JSON."""
    log = KafkaLog(bootstrap)
    weights, engine = WeightPrefetch(log, RUN), ToyEngine(delay_s=STEP_S)
    prompt, sampling = np.zeros(4, np.int32), Sampling(max_new_tokens=1000, stop_ids=())
    taken: dict[str, list[float]] = {"before": [], "while it comes": []}
    began, group = time.perf_counter(), 0
    cpu = time.process_time()
    phase = "before"
    while weights.version < 0:
        weights.check()
        if engine.idle:
            group += 1
            engine.submit(GroupRequest(group=group, prompt_ids=prompt, samples=(0, 1), rows=2, seed=0, sampling=sampling))
        started = time.perf_counter()
        engine.step()
        now = time.perf_counter()
        taken[phase].append(now - started)
        if phase == "before" and now - began > BEFORE_S:
            phase, began, cpu = "while it comes", now, time.process_time()
            print("ready", flush=True)
    seconds, busy = time.perf_counter() - began, time.process_time() - cpu
    figures = {
        name: {
            "steps": len(values),
            **{f"p{share:g}_ms": 1e3 * float(np.percentile(values, share)) for share in (50, 99, 99.9)},
            "max_ms": 1e3 * max(values),
        }
        for name, values in taken.items()
    }
    weights.close()
    log.close()
    print(json.dumps({"took_s": seconds, "cpu_s": busy, "steps": figures}), flush=True)


def main() -> None:
    """Publish, have it fetched beside an engine, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--draw", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.draw:
        draw(chosen.draw)
        return
    words = int(chosen.gigabytes * 1e9 / 2 / TENSORS)
    data = memoryview(np.random.default_rng(0).integers(0, 2**16, words, dtype=np.uint16)).cast("B")
    tensors = [TensorBytes(name=f"w{number:02}", dtype="bfloat16", shape=(words,), data=data) for number in range(TENSORS)]
    with tempfile.TemporaryDirectory(prefix="penstock-jitter-") as place:
        try:
            log = KafkaLog(embedded.start(home=Path(place)).bootstrap)
            log.create_topics(topics_of(RUN, partitions=1, weight_partitions=PARTITIONS))
            producer = log.producer(max_in_flight_bytes=32 << 20, linger_ms=0.0)
            places = chunk_partitions(0, count=PARTITIONS)
            manifest = send_version(producer, tensors, run=RUN, version=0, step=0, partitions=places, max_bytes=CHUNK_BYTES, base=None)
            command = [sys.executable, __file__, "--draw", log.bootstrap]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}) as process:
                assert process.stdout is not None
                assert process.stdout.readline() == "ready\n", "the reader has failed"
                producer.send(manifest_record(manifest, run=RUN)).offset()
                found = json.loads(process.stdout.readline())
            producer.close()
            log.close()
        finally:
            embedded.stop(Path(place))
    print(f"{manifest.nbytes / 1e9:.2f} GB in {found['took_s']:.1f} s, {found['cpu_s']:.1f} s of CPU; load {os.getloadavg()[0]:.1f}")
    for name, values in found["steps"].items():
        print(f"{name:15} " + ", ".join(f"{key} {value:.4g}" for key, value in values.items()))


if __name__ == "__main__":
    main()
