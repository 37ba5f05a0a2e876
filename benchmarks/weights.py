"""What publishing a version costs at real size: a delta against the whole version and against a memory copy of the same bytes.

    python benchmarks/weights.py --rounds 5
    python benchmarks/weights.py --rounds 5 --layers 4 --changed 0.05

Random bfloat16 weights in the shapes of Qwen2.5-0.5B go through an embedded broker of its own. In each round a memory copy with a
comparison, a whole version and a delta are measured one after the other; figures are medians over the rounds. "published to applied" is
from a version's bytes in the trainer to the same bytes in a reader of the same process, digest and hashes included. Stall and memory are
those of processes of their own (benchmarks/weights_at_work.py); `--only transfer` leaves them out.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import weights_at_work

from penstock.infra.broker import embedded
from penstock.infra.kafka.log import KafkaLog
from penstock.infra.tensors.stream import HASH, TensorBytes
from penstock.infra.tensors.weight_copy import WeightCopy
from penstock.pipeline.runtime.weights.publish import Base, chunk_partitions, send_version
from penstock.pipeline.runtime.weights.read import ChunkReader, bring
from penstock.topics.catalogue import topics_of
from penstock.topics.versions import weight_delta
from penstock.topics.weights import Manifest

RUN, AT_WORK, PARTITIONS, CHUNK_BYTES = "weights", "at-work", 10, 8 << 20
HIDDEN, KEYS, INNER, VOCABULARY = 896, 128, 4864, 151_936
LIMITS = {"delta / whole": 0.1, "encode / copy": 3.0, "apply / copy": 3.0}
STALL_SHARE = 0.05


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
    began = time.perf_counter()
    np.copyto(room, new)
    np.count_nonzero(old != new)
    return time.perf_counter() - began


def coded(old: Sequence[TensorBytes], new: Sequence[TensorBytes], target: np.ndarray) -> tuple[float, float, int]:
    """Seconds of encoding a delta and of applying it, without the log, and its bytes."""
    began, parts, start = time.perf_counter(), [], 0
    for before, after in zip(old, new, strict=True):
        for low, nbytes, item in weight_delta.pieces([(after.nbytes, 2)]):
            piece = slice(low, low + nbytes)
            parts += weight_delta.encode(before.data[piece], after.data[piece], start=start + low, item=item)
        start += after.nbytes
    stream, encoded = weight_delta.joined(parts), time.perf_counter() - began
    began = time.perf_counter()
    weight_delta.apply(stream, memoryview(target).cast("B"))
    return encoded, time.perf_counter() - began, len(stream)


def measure(log: KafkaLog, chosen: argparse.Namespace) -> dict[str, float]:
    """Medians of all figures, in seconds and bytes."""
    rng, total = np.random.default_rng(0), sum(int(np.prod(shape)) for shape in shapes(chosen.layers).values())
    old = rng.integers(0, 2**16, total, dtype=np.uint16)
    new, room = old.copy(), old.copy()
    producer, manifests, copy = log.producer(max_in_flight_bytes=32 << 20, linger_ms=0.0), dict[int, Manifest](), WeightCopy()
    reader = ChunkReader(log, RUN)  # stays open from version to version, as a worker's does
    found: dict[str, list[float]] = {}

    def note(**values: float) -> None:
        for name, value in values.items():
            found.setdefault(name, []).append(value)

    def through(version: int, base: Base | None, content: np.ndarray) -> float:
        began = time.perf_counter()
        manifests[version] = send_version(
            producer,
            described(content, chosen.layers),
            run=RUN,
            version=version,
            step=version,
            partitions=chunk_partitions(version, count=PARTITIONS),
            max_bytes=CHUNK_BYTES,
            base=base,
        )
        bring(copy, log, manifests, version, run=RUN, reader=reader)
        return time.perf_counter() - began

    for number in range(chosen.rounds):
        places = rng.integers(0, total, int(total * chosen.changed))
        np.copyto(new, old)
        new[places] ^= 1
        copy_s = copied_and_compared(old, new, room)
        np.copyto(room, old)
        encode_s, apply_s, nbytes = coded(described(old, chosen.layers), described(new, chosen.layers), room)
        assert np.array_equal(room, new)
        whole = 2 * number + 1
        whole_s = through(whole, None, old)
        delta_s = through(whole + 1, Base(version=whole, tensors=described(old, chosen.layers)), new)
        assert copy.computed(HASH) == manifests[whole + 1].digest
        note(copy_s=copy_s, encode_s=encode_s, apply_s=apply_s, nbytes=nbytes, whole_s=whole_s, delta_s=delta_s)
        log.delete_records({(f"{RUN}.weights", at): offset for at, offset in log_ends(log).items()})
        old, new = new, old
    reader.close()
    producer.close()
    return {name: statistics.median(values) for name, values in found.items()} | {"whole_bytes": 2.0 * total}


def log_ends(log: KafkaLog) -> dict[int, int]:
    """Partition of chunks -> its end."""
    return {at: end for (_, at), end in log.end_offsets([(f"{RUN}.weights", at) for at in range(2, PARTITIONS)]).items()}


def main() -> None:
    """Measure, print, and fail beyond a limit."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--changed", type=float, default=0.01, help="share of the elements that differ")
    parser.add_argument("--only", choices=["transfer", "at-work"], help="at-work: stall and memory; transfer: all else")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="penstock-weights-") as place:
        home = Path(place)
        try:
            log = KafkaLog(embedded.start(home=home).bootstrap)
            log.create_topics(topics_of(RUN, partitions=1, weight_partitions=PARTITIONS))
            found = measure(log, chosen) if chosen.only != "at-work" else {}
            if chosen.only != "transfer":
                log.create_topics(topics_of(AT_WORK, partitions=1, weight_partitions=PARTITIONS))
                asked = {"layers": chosen.layers, "changed": chosen.changed, "rounds": chosen.rounds}
                found |= weights_at_work.measure(log.bootstrap, run=AT_WORK, partitions=PARTITIONS, **asked)
            log.close()
        finally:
            embedded.stop(home)
    missed = chosen.only != "at-work" and told_transfer(found)
    if chosen.only != "transfer":
        missed |= told_at_work(found)
    print(f"load {os.getloadavg()[0]:.1f}")
    if missed:
        raise SystemExit(1)


def told_transfer(found: dict[str, float]) -> bool:
    """Print what a version takes from the trainer to a reader; whether a ratio is beyond its limit."""
    print(f"whole version   {found['whole_bytes'] / 1e6:9.1f} MB, published to applied {found['whole_s']:7.2f} s")
    print(f"delta           {found['nbytes'] / 1e6:9.1f} MB, published to applied {found['delta_s']:7.2f} s")
    print(f"memory copy and comparison {found['copy_s']:.2f} s, encode {found['encode_s']:.2f} s, apply {found['apply_s']:.2f} s")
    ratios = {
        "delta / whole": found["delta_s"] / found["whole_s"],
        "encode / copy": found["encode_s"] / found["copy_s"],
        "apply / copy": found["apply_s"] / found["copy_s"],
    }
    for name, ratio in ratios.items():
        print(f"{name:14} {ratio:6.3f}   limit {LIMITS[name]:g}")
    return any(ratio > LIMITS[name] for name, ratio in ratios.items())


def told_at_work(found: dict[str, float]) -> bool:
    """Print stall and memory; whether one is beyond its limit."""
    stall, step = max(found["stall_full_s"], found["stall_delta_s"]), found["step_s"]
    print(f"a step alone {step:.2f} s; stall for a whole version {found['stall_full_s']:.2f} s, for a delta {found['stall_delta_s']:.2f} s")
    print(f"stall / step   {stall / step:6.3f}   limit {STALL_SHARE:g}")
    slack = weights_at_work.SLACK_BYTES / 2**20
    for name, beside in (("trainer", "model and two copies"), ("reader", "its copy")):
        print(f"memory of the {name} beside {beside}: {found[f'{name}_bytes'] / 2**20:.0f} MiB   limit {slack:.0f}")
    most = max(found["trainer_bytes"], found["reader_bytes"])
    return stall > STALL_SHARE * step or most > weights_at_work.SLACK_BYTES


if __name__ == "__main__":
    main()
