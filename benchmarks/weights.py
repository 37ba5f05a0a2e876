"""Publishing a version at real size: a delta against a full snapshot and against a memory copy of the same bytes.

    python -m benchmarks weights --rounds 5
    python -m benchmarks weights --rounds 5 --layers 4 --changed 0.05
    python -m benchmarks weights --rounds 5 --transport ipc
    python -m benchmarks weights --rounds 16 --transport kafka --anchor-every 5

Random bfloat16 weights in the shapes of Qwen2.5-0.5B pass through an embedded broker. Each round measures a memory copy with a comparison,
a full snapshot and a delta one after the other; figures are medians over the rounds. "published to applied" lasts from the bytes in the
trainer to the same bytes in a reader of the same process, digest and hashes included. Status 1 if a ratio is beyond its limit.

With `--transport`, versions go from a model on the CPU to a worker as a trainer publishes them: each row has the seconds for which the
caller waited, until the log had the version, and until the worker could load it, and the longest time for which another thread stood still.
"""

import argparse
import os
import statistics
import time
from collections.abc import Sequence

import numpy as np
import torch

from benchmarks.support.command import own_broker, parser_of, with_numbers
from penstock.gpu_check.lane import Pauses
from penstock.infra.kafka.log import KafkaLog
from penstock.infra.tensors.host_memory import HostBuffers
from penstock.infra.tensors.stream import HASH, TensorBytes
from penstock.infra.tensors.torch_copy import CopyStream
from penstock.infra.tensors.weight_copy import WeightCopy
from penstock.pipeline.learner.policy_trainer import Weights
from penstock.pipeline.runtime.weights.publish import Base, chunk_partitions, send_version
from penstock.pipeline.runtime.weights.read import ChunkReader, bring
from penstock.pipeline.runtime.weights.receive import WeightPrefetch
from penstock.topics.catalogue import RUNS_SPEC, RUNS_TOPIC, topics_of
from penstock.topics.versions import weight_delta
from penstock.topics.weights import Manifest
from tests.support.number_run import RUN as NUMBER_RUN
from tests.support.published_weights import Publishing

RUN, PARTITIONS, CHUNK_BYTES = "weights", 10, 8 << 20
HIDDEN, KEYS, INNER, VOCABULARY = 896, 128, 4864, 151_936
LIMITS = {"delta / full": 0.1, "encode / copy": 3.0, "apply / copy": 3.0}


def shapes(layers: int) -> dict[str, tuple[int, ...]]:
    """Name -> shape of each parameter; the output layer is the embedding."""
    block: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (HIDDEN, HIDDEN), "self_attn.q_proj.bias": (HIDDEN,),
        "self_attn.k_proj.weight": (KEYS, HIDDEN), "self_attn.k_proj.bias": (KEYS,),
        "self_attn.v_proj.weight": (KEYS, HIDDEN), "self_attn.v_proj.bias": (KEYS,),
        "self_attn.o_proj.weight": (HIDDEN, HIDDEN),
        "mlp.gate_proj.weight": (INNER, HIDDEN), "mlp.up_proj.weight": (INNER, HIDDEN), "mlp.down_proj.weight": (HIDDEN, INNER),
        "input_layernorm.weight": (HIDDEN,), "post_attention_layernorm.weight": (HIDDEN,),
    }  # fmt: skip
    names = {f"model.layers.{layer}.{name}": shape for layer in range(layers) for name, shape in block.items()}
    return {"model.embed_tokens.weight": (VOCABULARY, HIDDEN), **names, "model.norm.weight": (HIDDEN,)}


def described(flat: np.ndarray, layers: int) -> list[TensorBytes]:
    """One array of 16-bit words as the model's tensors, in name order."""
    tensors, start = [], 0
    for name, shape in sorted(shapes(layers).items()):
        count = int(np.prod(shape))
        data = memoryview(flat[start : start + count]).cast("B")
        tensors.append(TensorBytes(name=name, dtype="bfloat16", shape=shape, data=data))
        start += count
    return tensors


def copied_and_compared(old: np.ndarray, new: np.ndarray, room: np.ndarray) -> float:
    """Seconds of a memory copy of a version and of its comparison with another one."""
    started = time.perf_counter()
    np.copyto(room, new)
    np.count_nonzero(old != new)
    return time.perf_counter() - started


def coded(old: Sequence[TensorBytes], new: Sequence[TensorBytes], target: np.ndarray) -> tuple[float, float, int]:
    """Seconds of encoding a delta and of applying it, without the log, and its bytes."""
    started, parts, start = time.perf_counter(), [], 0
    for before, after in zip(old, new, strict=True):
        for low, nbytes, item in weight_delta.pieces([(after.nbytes, 2)]):
            piece = slice(low, low + nbytes)
            parts += weight_delta.encode(before.data[piece], after.data[piece], start=start + low, item=item)
        start += after.nbytes
    stream, encoded = weight_delta.joined(parts), time.perf_counter() - started
    started = time.perf_counter()
    weight_delta.apply(stream, memoryview(target).cast("B"))
    return encoded, time.perf_counter() - started, len(stream)


def measure(log: KafkaLog, chosen: argparse.Namespace) -> dict[str, float]:
    """Medians of all figures, in seconds and bytes."""
    rng, total = np.random.default_rng(0), sum(int(np.prod(shape)) for shape in shapes(chosen.layers).values())
    old = rng.integers(0, 2**16, total, dtype=np.uint16)
    new, room = old.copy(), old.copy()
    producer, manifests, copy = log.producer(max_in_flight_bytes=32 << 20, linger_ms=0.0), dict[int, Manifest](), WeightCopy()
    reader = ChunkReader(log, RUN)  # stays open from version to version, as a worker's does
    rows: list[dict[str, float]] = []

    def through(version: int, base: Base | None, content: np.ndarray) -> float:
        started = time.perf_counter()
        manifests[version] = send_version(
            producer, described(content, chosen.layers), run=RUN, version=version, step=version,
            partitions=chunk_partitions(version, count=PARTITIONS), max_bytes=CHUNK_BYTES, base=base,
        )  # fmt: skip
        bring(copy, log, manifests, version, run=RUN, reader=reader)
        return time.perf_counter() - started

    for number in range(chosen.rounds):
        changed = rng.integers(0, total, int(total * chosen.changed))
        np.copyto(new, old)
        new[changed] ^= 1
        copy_s = copied_and_compared(old, new, room)
        np.copyto(room, old)
        encode_s, apply_s, nbytes = coded(described(old, chosen.layers), described(new, chosen.layers), room)
        assert np.array_equal(room, new)
        whole = 2 * number + 1
        whole_s = through(whole, None, old)
        delta_s = through(whole + 1, Base(version=whole, tensors=described(old, chosen.layers)), new)
        assert copy.computed(HASH) == manifests[whole + 1].digest
        row = {"copy_s": copy_s, "encode_s": encode_s, "apply_s": apply_s, "nbytes": nbytes, "whole_s": whole_s, "delta_s": delta_s}
        rows.append(row)
        log.delete_records(log.end_offsets([(f"{RUN}.weights", partition) for partition in range(2, PARTITIONS)]))
        old, new = new, old
    reader.close()
    producer.close()
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]} | {"whole_bytes": 2.0 * total}


def print_publications(log: KafkaLog, chosen: argparse.Namespace) -> None:
    """Publish versions of a model and print a row for each."""
    rng = np.random.default_rng(0)
    model = {
        name: torch.from_numpy(rng.integers(0, 2**14, shape, dtype=np.int16)).view(torch.bfloat16)
        for name, shape in shapes(chosen.layers).items()
    }
    copies = CopyStream(torch.device("cpu"), HostBuffers(shared=chosen.transport == "ipc"))
    trainer, worker = Publishing(log, transport=chosen.transport, anchor_every=chosen.anchor_every), None
    for version in range(chosen.rounds):
        for parameter in model.values():
            changed = rng.integers(0, parameter.numel(), int(parameter.numel() * chosen.changed))
            parameter.view(torch.int16).view(-1)[torch.from_numpy(changed)] ^= 1
        with Pauses() as pauses:
            started = time.perf_counter()
            trainer.writer.publish(Weights(lambda: copies.copy(model.items())), version=version, step=version)
            stall_s = time.perf_counter() - started
            logged_s = loadable_s = 0.0
            while not logged_s or not loadable_s:
                trainer.writer.finish_publishing(wait=False)
                if not logged_s and not trainer.writer.publishing:
                    logged_s = time.perf_counter() - started
                    worker = worker or WeightPrefetch(log, trainer.writer.session.run, direct=chosen.transport == "ipc")
                if worker is not None and worker.version == version:
                    loadable_s = loadable_s or time.perf_counter() - started
                time.sleep(0.01)
        manifest = trainer.writer.state.manifests[version]
        size = f"version {version} {manifest.encoding:6}{manifest.nbytes / 1e6:9.1f} MB"
        seconds = f"waited {stall_s:6.3f} s, in the log after {logged_s:6.2f} s, with the worker after {loadable_s:6.2f} s"
        print(f"{size}  {seconds}, longest pause {1e3 * pauses.longest_s:6.1f} ms", flush=True)
    trainer.writer.close_run(steps=chosen.rounds, status="finished", reason="measured")
    if worker is not None:
        worker.close()
    trainer.writer._publisher.close()


def main(arguments: Sequence[str]) -> int:
    """Measure and print."""
    parser = parser_of(__name__, __doc__)
    with_numbers(parser, rounds=5, layers=24)
    parser.add_argument("--changed", type=float, default=0.01, help="share of the elements that differ")
    parser.add_argument("--transport", choices=("kafka", "ipc"), help="publish as a trainer does, by this transport")
    parser.add_argument("--anchor-every", type=int, default=20, help="with --transport: versions between two snapshots")
    chosen = parser.parse_args(arguments)
    with own_broker("weights") as (_, broker):
        log = KafkaLog(broker.bootstrap)
        if chosen.transport is not None:
            log.create_topics({RUNS_TOPIC: RUNS_SPEC, **topics_of(NUMBER_RUN, partitions=1, weight_partitions=PARTITIONS)})
            print_publications(log, chosen)
            log.close()
            return 0
        log.create_topics(topics_of(RUN, partitions=1, weight_partitions=PARTITIONS))
        figures = measure(log, chosen)
        log.close()
    print(f"full snapshot   {figures['whole_bytes'] / 1e6:9.1f} MB, published to applied {figures['whole_s']:7.2f} s")
    print(f"delta           {figures['nbytes'] / 1e6:9.1f} MB, published to applied {figures['delta_s']:7.2f} s")
    seconds = f"encode {figures['encode_s']:.2f} s, apply {figures['apply_s']:.2f} s"
    print(f"memory copy and comparison {figures['copy_s']:.2f} s, {seconds}, load {os.getloadavg()[0]:.1f}")
    ratios = {
        "delta / full": figures["delta_s"] / figures["whole_s"],
        "encode / copy": figures["encode_s"] / figures["copy_s"],
        "apply / copy": figures["apply_s"] / figures["copy_s"],
    }
    for name, ratio in ratios.items():
        print(f"{name:14} {ratio:6.3f}   limit {LIMITS[name]:g}")
    return int(any(ratio > LIMITS[name] for name, ratio in ratios.items()))
