"""What `penstock audit` keeps of a group: peak of resident memory at two sizes, and the difference in bytes a group.

    python benchmarks/audit_memory.py
    python benchmarks/audit_memory.py --groups 250000 1000000 --decoded

The run is made up as it is read, record by record with the workers' codecs: U = 256 groups of K = 8 samples a step, one record per sample
(`--together`: one per group), a manifest a version, on 8 partitions. With `--decoded` records carry their objects instead of bytes and the
codecs are passed by, so that only the audit's own work and memory are left: that takes a tenth of the time. Each size runs in a process of
its own. Nothing is extrapolated. Ends with 1 when a million groups, if that many were asked for, took more than 1 GB.
"""

import argparse
import hashlib
import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from penstock.pipeline.inspect.audit.report import as_text, audit, summary  # noqa: E402
from penstock.topics import groups, prompts, rollouts, weights  # noqa: E402
from penstock.topics.groups import Group  # noqa: E402
from penstock.topics.ledger import Planned  # noqa: E402
from penstock.topics.wire.headers import Headers  # noqa: E402
from penstock.topics.wire.record import Outgoing, Record  # noqa: E402
from tests.support.a_run import RUN, Teller  # noqa: E402

U, K, PARTITIONS = 256, 8, 8
LIMIT_BYTES = 10**9
EMPTY = hashlib.sha256().hexdigest()
"""Digest of weights without tensors."""


class MadeRun:
    """A finished run of some groups, S = 1 and lag 0, whose records are made when they are read; a source of the audit."""

    def __init__(self, count: int, *, together: bool, decoded: bool) -> None:
        self.run, self._count, self._together, self._decoded = RUN, count, together, decoded
        self.steps = count // U
        schedule = {"mode": "pipelined", "prompts_per_step": U, "samples_per_prompt": K, "steps_per_version": 1}
        self._teller = Teller(RUN, steps=self.steps, config={"schedule": {**schedule, "max_lag": None, "order": "submission"}})
        told = self._teller.group([0.0, 1.0] * (K // 2), version=0, tokens=16)
        self._prompt = prompts.decode(told[0].value)
        self._group = groups.decode(told[-1].value)
        self._span = np.zeros(1, np.int32)

    def partitions(self, topic: str) -> range:
        """One for the topics of single writers."""
        return range(PARTITIONS if topic in ("prompts", "rollouts", "groups") else 2 if topic == "weights" else 1)

    def start_offset(self, topic: str, partition: int) -> int:
        """Everything is kept."""
        return 0

    def read(self, topic: str, partitions: Sequence[int] | None = None) -> Iterator[Record]:
        """The records of a topic; its partitions take turns, as on a broker."""
        made = {"prompts": self._prompts, "rollouts": self._samples, "groups": self._groups, "weights": self._manifests}
        offsets = dict.fromkeys(self.partitions(topic), 0)
        if topic == "weights" and partitions != [0]:
            return
        for outgoing in made.get(topic, lambda: self._other(topic))():
            yield record_of(outgoing, offsets)

    def _other(self, topic: str) -> Iterator[Outgoing]:
        if topic == "run":
            yield self._teller.made()
        elif topic == "metrics":
            yield from (self._teller.measured_by(worker, "final") for worker in ("feeder", "rollout-0", "scorer-0", "trainer", "tracker"))
        elif topic == "ledger":
            yield self._teller.opened()
            yield self._teller.entry("version", step=0, version=0, digest=EMPTY)
            for step in range(self.steps):
                plan = (self._planned(group) for group in range(step * U, (step + 1) * U))
                yield self._teller.entry("step", step=step, version=step, plan=tuple(plan), boundaries=(U * K,))
                yield self._teller.entry("version", step=step + 1, version=step + 1, digest=EMPTY)
            yield self._teller.entry("run-closed", step=self.steps, digest=EMPTY)

    def _planned(self, group: int) -> Planned:
        sha256 = groups.digest([self._outcome(group).value])
        return Planned(group=group, sha256=sha256, partition=group % PARTITIONS, offset=group // PARTITIONS)

    def _prompts(self) -> Iterator[Outgoing]:
        for number in range(self.steps * U):
            prompt = replace(self._prompt, group=number, slot=number, row=number, min_version=number // U)
            yield self._out("prompts", number, prompt, lambda made: (prompts.headers(made, run=RUN), prompts.encode(made)))

    def _samples(self) -> Iterator[Outgoing]:
        for number in range(self.steps * U):
            drawn = tuple(sample.rollout for sample in self._made(number).samples)
            for held in [drawn] if self._together else [(one,) for one in drawn]:
                yield self._out("rollouts", number, held, lambda made: (rollouts.headers(*made, run=RUN), rollouts.encode(*made)))

    def _groups(self) -> Iterator[Outgoing]:
        return (self._outcome(number) for number in range(self.steps * U))

    def _outcome(self, number: int) -> Outgoing:
        return self._out("groups", number, self._made(number), lambda made: groups.encode_parts(made, run=RUN, worker="scorer-0")[0])

    def _made(self, number: int) -> Group:
        """The same objects each time, with other numbers: whoever reads them keeps none."""
        self._span[0] = number // U
        for sample in self._group.samples:
            for name, value in (("group", number), ("span_versions", self._span), ("started_ns", number)):
                object.__setattr__(sample.rollout, name, value)
        for name, value in (("group", number), ("slot", number), ("row", number), ("min_version", number // U)):
            object.__setattr__(self._group, name, value)
        return self._group

    def _manifests(self) -> Iterator[Outgoing]:
        for version in range(self.steps + 1):
            empty: dict[str, Any] = dict.fromkeys(
                ("names", "dtypes", "shapes", "chunk_partitions", "chunk_offsets", "chunk_sizes", "chunk_sha256"), ()
            )
            made = weights.Manifest(
                version=version, step=version, encoding="full", base_version=None, digest=EMPTY, nbytes=0, created_ns=1, **empty
            )
            value = weights.encode(made)
            yield Outgoing(topic=f"{RUN}.weights", partition=0, key=b"0", headers=weights.headers(made, run=RUN).encode(value), value=value)

    def _out(self, topic: str, number: int, made: Any, encode: Any) -> Outgoing:
        headers, value = (made, b"%d" % number) if self._decoded else encode(made)
        raw = made if self._decoded else headers.encode(value)
        return Outgoing(topic=f"{RUN}.{topic}", partition=number % PARTITIONS, key=b"%d" % number, headers=raw, value=value)


def record_of(outgoing: Outgoing, offsets: dict[int, int]) -> Record:
    """The record at the end of its partition."""
    offset, offsets[outgoing.partition] = offsets[outgoing.partition], offsets[outgoing.partition] + 1
    fields = {name: getattr(outgoing, name) for name in ("topic", "partition", "key", "headers", "value")}
    return Record(offset=offset, timestamp_ms=1_700_000_000_000 + offset, **fields)


def pass_the_codecs_by() -> None:
    """Let `topics` hand over the objects that records carry."""
    claims = Headers(run=RUN, schema=groups.SCHEMA, part=0, parts=1)
    carried: Any = lambda record, **_: (None, record.headers)  # noqa: E731
    handing: dict[Any, dict[str, Any]] = {
        prompts: {"read": carried},
        rollouts: {"read_all": carried},
        groups: {
            "check": lambda record, **_: replace(claims, group=record.headers.group, sha256=f"{record.headers.group:064x}"),
            "read": lambda records, **_: (None, records[0].headers),
        },
    }
    for module, functions in handing.items():
        for name, function in functions.items():
            setattr(module, name, function)


def measured(count: int, *, together: bool, decoded: bool) -> dict[str, Any]:
    """Audit a made run in this process."""
    source = MadeRun(count, together=together, decoded=decoded)
    if decoded:
        pass_the_codecs_by()
    begun = time.monotonic()
    audited = audit(source)
    seconds, text = time.monotonic() - begun, summary(audited)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if not audited.clean:
        raise SystemExit(as_text(audited))
    return {"groups": source.steps * U, "s": round(seconds, 1), "cpu_s": round(time.process_time(), 1), "peak_bytes": peak, "audit": text}


def main() -> int:
    """Measure every size in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, nargs="+", default=[5_120, 20_480])
    parser.add_argument("--together", action="store_true", help="one record of a group's samples")
    parser.add_argument("--decoded", action="store_true", help="without the codecs")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measured(arguments.groups[0], together=arguments.together, decoded=arguments.decoded)))
        return 0
    how = [name for name in ("--together", "--decoded") if getattr(arguments, name[2:])]
    found: list[dict[str, Any]] = []
    for count in arguments.groups:
        command = [sys.executable, __file__, "--one", "--groups", str(count), *how]
        found.append(json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout))
        row = found[-1]
        took = f"peak {row['peak_bytes'] / 1e6:,.0f} MB, {row['s']:,} s, {row['cpu_s']:,} s of CPU"
        print(f"{row['groups']:>9,} groups of {K}: {took}; {row['audit']}", flush=True)
    for low, high in pairwise(found):
        more = (high["peak_bytes"] - low["peak_bytes"]) / (high["groups"] - low["groups"])
        print(f"{more:,.0f} bytes for each group more, {more / K:,.0f} a sample")
    return int(any(row["groups"] > 990_000 and row["peak_bytes"] > LIMIT_BYTES for row in found))


if __name__ == "__main__":
    raise SystemExit(main())
