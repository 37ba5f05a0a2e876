"""Damage at random places of SmolLM2's published weights: each must be found out.

    python benchmarks/damaged_weights.py --places 10000
    python benchmarks/damaged_weights.py --places 10000 --model .penstock/smollm2

Publishes a whole version and a delta of 1 % of the elements on the in-memory log, in chunks as the trainer cuts them; without `--model`
the weights are random bfloat16 numbers in SmolLM2-135M's shapes. Then, at each of so many random places of all chunk records, one bit is
flipped and the chunk is read as a reader reads it. For every hundredth place a worker whose copy holds the version before tries the whole
version, and must keep what it has. Every tenth chunk is encoded anew around the wrong byte, so that its own checksum fits, and every
twentieth is listed in the manifest with its wrong hash, too, so that only the version's digest is left. Ends with 1 if any is missed.
"""

import argparse
import hashlib
import os
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np

from penstock.infra.errors import LogError
from penstock.infra.memory.log import MemoryLog
from penstock.infra.tensors.stream import TensorBytes
from penstock.infra.tensors.weight_copy import NONE, WeightCopy
from penstock.pipeline.runtime.weights.publish import Base, chunk_partitions, send_version
from penstock.pipeline.runtime.weights.read import ChunkReader, bring
from penstock.topics import weights
from penstock.topics.catalogue import topics_of
from penstock.topics.weights import Chunk, Manifest
from penstock.topics.wire.record import Record

RUN, PARTITIONS, CHUNK_BYTES, CHANGED = "damaged", 10, 8 << 20, 0.01
HIDDEN, KEYS, INNER, VOCABULARY, LAYERS = 576, 192, 1536, 49_152, 30


class Log(MemoryLog):
    """An in-memory log in which a record can be damaged."""

    def put(self, record: Record) -> None:
        """Replace the record at an offset."""
        with self._state.change:
            records = self._state.part((record.topic, record.partition)).records
            records[next(index for index, one in enumerate(records) if one.offset == record.offset)] = record


def random_weights() -> list[TensorBytes]:
    """Random bfloat16 numbers in SmolLM2-135M's shapes."""
    block = {
        "q_proj": (HIDDEN, HIDDEN), "k_proj": (KEYS, HIDDEN), "v_proj": (KEYS, HIDDEN), "o_proj": (HIDDEN, HIDDEN),
        "gate_proj": (INNER, HIDDEN), "up_proj": (INNER, HIDDEN), "down_proj": (HIDDEN, INNER), "norm_1": (HIDDEN,), "norm_2": (HIDDEN,),
    }  # fmt: skip
    shapes = {f"layers.{layer:02}.{name}": shape for layer in range(LAYERS) for name, shape in block.items()}
    shapes |= {"embed_tokens": (VOCABULARY, HIDDEN), "norm": (HIDDEN,)}
    rng = np.random.default_rng(0)
    numbers = {name: rng.integers(0, 2**16, int(np.prod(shape)), dtype=np.uint16) for name, shape in sorted(shapes.items())}
    return [TensorBytes(name=name, dtype="bfloat16", shape=shapes[name], data=memoryview(flat).cast("B")) for name, flat in numbers.items()]


def weights_of(directory: Path) -> list[TensorBytes]:
    """The weights of a model directory."""
    from safetensors.torch import load_file

    from penstock.infra.tensors.torch_copy import to_bytes

    return sorted(to_bytes(load_file(directory / "model.safetensors").items()), key=lambda tensor: tensor.name)


def changed(tensors: list[TensorBytes]) -> list[TensorBytes]:
    """A copy in which 1 % of the elements differ."""
    rng, after = np.random.default_rng(1), []
    for tensor in tensors:
        flat = np.frombuffer(bytes(tensor.data), dtype=np.uint16).copy()
        flat[rng.integers(0, len(flat), int(len(flat) * CHANGED) + 1)] ^= 1
        after.append(replace(tensor, data=memoryview(flat).cast("B")))
    return after


class Damaged:
    """Two published versions, which are damaged in one place after the other."""

    def __init__(self, first: list[TensorBytes]) -> None:
        self.log, second = Log(), changed(first)
        self.log.create_topics(topics_of(RUN, partitions=1, weight_partitions=PARTITIONS))
        producer = self.log.producer()
        self.manifests = dict[int, Manifest]()
        for version, tensors, base in ((0, first, None), (1, second, Base(version=0, tensors=first))):
            self.manifests[version] = send_version(
                producer, tensors, run=RUN, version=version, step=version, base=base,
                partitions=chunk_partitions(version, count=PARTITIONS), max_bytes=CHUNK_BYTES,
            )  # fmt: skip
        self.copy, self.found = WeightCopy(), Counter[str]()
        self.hold_first()

    def hold_first(self) -> None:
        """The copy holds version 0."""
        bring(self.copy, self.log, self.manifests, 0, run=RUN)

    def damage(self, number: int, version: int, index: int, place: float) -> bool:
        """Damage a chunk at a place between 0 and 1 of its length; True if reading finds it out, and keeps what it should."""
        sound = self.manifests[version]
        partition, offset = weights.chunk_places(sound)[index]
        (record,) = self.log.read(f"{RUN}.weights", partition, [offset])
        how = "hash in the manifest, too" if number % 100 == 50 else "checksum right" if number % 10 == 0 else "bit flipped"
        data = bytes(record.value) if how == "bit flipped" else bytes(weights.read_chunk(record, run=RUN)[1].data)
        at = int(place * len(data))
        wrong = bytearray(data)
        wrong[at] ^= 1 << (number % 8)
        if how == "bit flipped":
            self.log.put(replace(record, value=bytes(wrong)))
        else:
            chunk = Chunk(version=version, index=index, data=bytes(wrong))
            value = weights.encode_chunk(chunk)
            self.log.put(replace(record, value=value, headers=weights.chunk_headers(chunk, run=RUN).encode(value)))
        manifest = sound
        if how == "hash in the manifest, too":
            hashes = [*sound.chunk_sha256]
            hashes[index] = hashlib.sha256(wrong).hexdigest()
            manifest = replace(sound, chunk_sha256=tuple(hashes))
        whole = number % 100 == 0 or manifest is not sound
        caught = self.is_refused(version, manifest) if whole else self.is_refused_alone(partition, offset, index, manifest)
        self.log.put(record)
        self.found[f"{how}{', whole version' if whole else ''}"] += 1
        return caught

    def is_refused_alone(self, partition: int, offset: int, index: int, manifest: Manifest) -> bool:
        """Read one chunk."""
        (record,) = self.log.read(f"{RUN}.weights", partition, [offset])
        try:
            ChunkReader(self.log, RUN).checked(record, manifest, index)
        except LogError:
            return True
        return False

    def is_refused(self, version: int, manifest: Manifest) -> bool:
        """Try the whole version; a worker that holds the one before it must keep that, unless only the digest tells."""
        copy = self.copy if version else WeightCopy()
        try:
            bring(copy, self.log, self.manifests | {version: manifest}, version, run=RUN)
        except LogError:
            only_digest = manifest is not self.manifests[version]
            kept = self.copy.version == 0 or (only_digest and self.copy.version == NONE)
        else:
            kept = False
        if self.copy.version != 0:
            self.hold_first()
        return kept


def main() -> int:
    """Damage, count, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--places", type=int, default=10_000)
    parser.add_argument("--model", type=Path, help="model directory instead of random weights")
    chosen = parser.parse_args()
    damaged = Damaged(weights_of(chosen.model) if chosen.model else random_weights())
    rng, began = np.random.default_rng(2), time.monotonic()
    chunks = [(version, index) for version, one in damaged.manifests.items() for index in range(len(one.chunk_sizes))]
    sizes = np.array([damaged.manifests[version].chunk_sizes[index] for version, index in chunks], dtype=float)
    missed = 0
    # Half of the places in proportion to size, half as many in each chunk: else few would be in the delta.
    for number in range(chosen.places):
        which = rng.choice(len(chunks), p=sizes / sizes.sum() if number % 2 else None)
        missed += not damaged.damage(number, *chunks[which], float(rng.random()))
    whole, delta = (manifest.nbytes / 1e6 for manifest in damaged.manifests.values())
    took = time.monotonic() - began
    print(f"whole version {whole:.1f} MB, delta {delta:.2f} MB, {len(chunks)} chunks; {chosen.places} places in {took:.0f} s")
    print(", ".join(f"{how}: {count}" for how, count in sorted(damaged.found.items())))
    print(f"missed: {missed}; load {os.getloadavg()[0]:.1f}")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
