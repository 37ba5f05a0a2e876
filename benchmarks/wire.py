"""Microseconds a record takes to encode and decode, for samples of 8 and of 2,000 tokens, beside pyarrow on the same columns.

    python benchmarks/wire.py --rounds 30

One sample alone, 16 of a group in one record, and a scored group of 16. "pyarrow" writes the same arrays, which exist already, with
`ipc.new_stream`, and reads them with full validation into a record batch; what it leaves out is making arrays of values and values
of arrays. CPU time of this thread; ways alternate within a round, figures are medians over the rounds.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.topics import groups, rollouts

SAMPLES = 16
REPEATS = 20


def a_sample(number: int, tokens: int) -> rollouts.Rollout:
    """A finished sample of `tokens` tokens, drawn under two policy versions."""
    random = np.random.default_rng(number)
    return rollouts.Rollout(
        group=3,
        sample=number,
        token_ids=random.integers(0, 150_000, tokens, np.int32),
        behaviour_logprobs=-random.random(tokens, np.float32),
        loss_mask=np.ones(tokens, np.bool_),
        span_versions=np.array([4, 5], np.int32),
        span_starts=np.array([0, tokens // 2], np.int32),
        finish="stop",
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        started_ns=10**18,
        ended_ns=10**18 + 1,
        worker="rollout-0",
    )


def a_group(samples: list[rollouts.Rollout]) -> groups.Group:
    """These samples with rewards and texts of four characters a token."""
    scored = [
        groups.ScoredSample(rollout=sample, completion="word" * len(sample.token_ids), reward=1.0, components=(1.0, None))
        for sample in samples
    ]
    return groups.Group(
        group=3,
        outcome="scored",
        reason=None,
        slot=3,
        min_version=4,
        samples_per_prompt=len(samples),
        epoch=0,
        row=7,
        prompt="What is 1 + 1?" * 20,
        prompt_ids=np.arange(100, dtype=np.int32),
        columns='{"answer": "2"}',
        reward_names=("exact", "short"),
        reward_weights=(1.0, 0.5),
        samples=tuple(scored),
        created_ns=10**18,
        scored_ns=10**18 + 2,
    )


def streamed(batch: pa.RecordBatch) -> bytes:
    """A batch as an Arrow IPC stream, by pyarrow's own writer."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue().to_pybytes()  # type: ignore[no-any-return]


def validated(value: bytes) -> pa.RecordBatch:
    """The batch in a stream, all its buffers checked."""
    with pa.ipc.open_stream(value) as stream:
        batch = stream.read_next_batch()
    batch.validate(full=True)
    return batch


def cpu_us(call: Callable[[], Any]) -> float:
    """Microseconds of this thread's CPU time that a call takes, over `REPEATS` of them."""
    began = time.thread_time()
    for _ in range(REPEATS):
        call()
    return (time.thread_time() - began) / REPEATS * 1e6


def measure(name: str, encode: Callable[[], bytes], decode: Callable[[bytes], Any], *, rounds: int) -> None:
    """Print one line: bytes of the record, and the four times."""
    value = encode()
    batch = validated(value)
    ways: tuple[Callable[[], Any], ...] = (encode, lambda: streamed(batch), lambda: decode(value), lambda: validated(value))
    times = [[cpu_us(way) for way in ways] for _ in range(rounds)]
    medians = [statistics.median(column) for column in zip(*times, strict=True)]
    print(f"{name:34} {len(value):9,} {medians[0]:9.0f} {medians[1]:9.0f} {medians[2]:9.0f} {medians[3]:9.0f}")


def main() -> None:
    """Measure records of both sizes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    rounds = parser.parse_args().rounds
    print(f"{'':34} {'bytes':>9} {'encode':>9} {'pyarrow':>9} {'decode':>9} {'pyarrow':>9}   [us]")
    for tokens in (8, 2000):
        samples = [a_sample(number, tokens) for number in range(SAMPLES)]
        group = a_group(samples)
        measure(f"1 sample of {tokens:,} tokens", lambda samples=samples: rollouts.encode(samples[0]), rollouts.decode, rounds=rounds)
        measure(f"{SAMPLES} samples in one record", lambda samples=samples: rollouts.encode(*samples), rollouts.decode_all, rounds=rounds)
        measure(f"a scored group of {SAMPLES}", lambda group=group: groups.encode(group), groups.decode, rounds=rounds)


if __name__ == "__main__":
    main()
