"""A rollout worker on vLLM against bare vLLM on the same prompts: tokens per second acknowledged in Kafka, with and without swaps.

    python benchmarks/worker_throughput.py --rounds 5 --seconds 8

One process draws; the four ways alternate in windows of some seconds: vLLM's own `LLMEngine` driven directly, the rollout worker with
everything it does (prompts from Kafka, samples to Kafka, commits, statuses), and the worker with new weights every half second, which
another process publishes, with keys and values kept or computed anew. Feeder, scorer and broker are processes apart, on the other cores.
In every way the engine's rows are full from a window's begin to its end. Ratios are taken within a round, figures are
medians over the rounds.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from command import PENSTOCK
from engine_swaps import open_bare
from random_model import SIZES, make_model

from penstock.infra.broker import embedded
from penstock.infra.kafka.log import KafkaLog
from penstock.infra.tensors.stream import TensorBytes
from penstock.pipeline.config.load import Config, from_table
from penstock.pipeline.data.tiny.model import tiny_tokenizer
from penstock.pipeline.launch.create import create
from penstock.pipeline.learner.ledger_history import read_ledger_history
from penstock.pipeline.learner.policy_trainer import Weights
from penstock.pipeline.runtime.session import Session, join
from penstock.pipeline.runtime.weights.prefetch import WeightPrefetch
from penstock.workers.rollout.group_worker import GroupWorker
from penstock.workers.trainer.run_writer import RunWriter

RUN = "throughput"
LIMITS = {"worker": 0.95, "keep": 0.88, "stall_ms": 100.0}
WAYS = ("bare", "worker", "keep", "recompute")


def config_of(model: Path, chosen: argparse.Namespace, bootstrap: str) -> Config:
    """A run that admits as much as the worker can draw, and whose samples nothing ends but their length or a stop id."""
    return from_table(
        {
            "run": {"steps": 100_000},
            "model": {"path": str(model)},
            "data": {"source": "tiny:successor", "size": 256, "max_prompt_tokens": 32},
            "schedule": {
                "mode": "in_flight",
                "prompts_per_step": 8,
                "samples_per_prompt": 8,
                "max_lag": 100_000,
                "max_drops_per_step": 10_000_000,
            },
            "sampling": {"max_new_tokens": chosen.tokens},
            "rollout": {
                "engine": "vllm",
                "workers": 1,
                "concurrency": chosen.concurrency,
                "engine_process": chosen.engine_process,
            },
            "trainer": {"export": False, "checkpoint_every": 0},
            "kafka": {"bootstrap": bootstrap},
            "mlflow": {"enabled": False},
        }
    )


class Acknowledged:
    """Counts the tokens of samples that the broker has acknowledged."""

    def __init__(self, session: Session) -> None:
        self._session, self._flying, self._tokens = session, list[tuple[Any, int]](), 0
        self._send, self._counted = session.producer.send, 0.0
        session.producer.send = self._watched  # type: ignore[method-assign]

    def _watched(self, outgoing: Any) -> Any:
        pending = self._send(outgoing)
        if outgoing.topic.endswith(".rollouts"):
            tokens = int(next(value for name, value in outgoing.headers if name == "tokens"))
            self._flying.append((pending, tokens))
        return pending

    def tokens(self) -> int:
        """Tokens acknowledged so far."""
        self._tokens += sum(tokens for pending, tokens in self._flying if pending.done())
        self._flying = [(pending, tokens) for pending, tokens in self._flying if not pending.done()]
        return self._tokens


class Bare:
    """vLLM alone, its rows full, with the logprob of every token and no seeds."""

    def __init__(self, llm: Any, prompts: Iterator[list[int]], *, tokens: int, rows: int) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self._llm, self._prompts, self._rows, self._number, self._in_work = llm, prompts, rows, 0, 0
        self._parameters: Callable[[], Any] = lambda: SamplingParams(
            temperature=1.0, max_tokens=tokens, ignore_eos=True, stop_token_ids=[2], logprobs=0, flat_logprobs=True, detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )  # fmt: skip

    def turn(self) -> int:
        """One step; tokens of the samples that ended with it."""
        while self._in_work < self._rows:
            prompt = next(self._prompts)
            for _ in range(8):
                self._llm.add_request(str(self._number), {"prompt_token_ids": prompt}, self._parameters())
                self._number += 1
                self._in_work += 1
        ended = [output for output in self._llm.step() if output.finished]
        self._in_work -= len(ended)
        return sum(len(output.outputs[0].token_ids) for output in ended)


@contextmanager
def publishing(bootstrap: str, *, every_s: float) -> Iterator[Callable[[bool], None]]:
    """Another process that publishes new versions while it is told to."""
    command = [sys.executable, __file__, "--publish", bootstrap, "--every", str(every_s)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        if not process.stdout.readline():
            raise SystemExit("the publisher ended before version 0 was out")

        def swap(on: bool) -> None:
            assert process.stdin is not None
            print("on" if on else "off", file=process.stdin, flush=True)

        try:
            yield swap
        finally:
            process.stdin.close()
            process.wait(30)


def publish(bootstrap: str, *, every_s: float) -> None:
    """Be the trainer of the run as far as versions go: 0 at once, then one every `every_s` while the input's last line is "on"."""
    from safetensors.numpy import load_file

    log = KafkaLog(bootstrap, client_id="publisher")
    session = join(run=RUN, role="trainer", log=log, worker="trainer", model=None, stop=threading.Event())
    assert session is not None
    writer = RunWriter(session, log.transactions(f"{RUN}.trainer"), read_ledger_history(log, RUN).ledger_state)
    writer.write("run-opened", details="{}")
    held = load_file(Path(session.config.model.path) / "model.safetensors")

    def version_of(number: int) -> list[TensorBytes]:
        scale = np.float32(1.0 + 0.01 * (number % 2))
        return [TensorBytes(name=name, dtype="float32", shape=value.shape, data=(value * scale).tobytes()) for name, value in held.items()]

    writer.publish(Weights(partial(version_of, 0)), version=0, step=0)
    writer.finish_publishing()
    print("ready", flush=True)
    on, version = threading.Event(), 0

    def listen() -> None:
        for line in sys.stdin:
            (on.set if line.strip() == "on" else on.clear)()
        os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    while True:
        on.wait()
        version, began = version + 1, time.monotonic()
        writer.publish(Weights(partial(version_of, version)), version=version, step=version)
        writer.finish_publishing()
        time.sleep(max(0.0, every_s - (time.monotonic() - began)))


def measure(chosen: argparse.Namespace, directory: Path) -> tuple[dict[str, list[float]], list[float], int]:
    """(tokens per second by way, milliseconds of each swap with `keep`, the model's parameters)."""
    parameters = make_model(directory / "model", size=chosen.size)
    tiny_tokenizer().save_pretrained(directory / "model")
    os.environ["PENSTOCK_HOME"] = str(directory / "home")
    first, *left = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, left or [first])  # the broker and all processes that are started from here on inherit it
    bootstrap = embedded.start().bootstrap
    log = KafkaLog(bootstrap, client_id="bench")
    config = config_of(directory / "model", chosen, bootstrap)
    create(config, log=log, run_id=RUN, notify=lambda _: None)
    others = [
        subprocess.Popen([*PENSTOCK, "worker", role, "--run", RUN, "--bootstrap", bootstrap], stdout=subprocess.DEVNULL)
        for role in ("feeder", "scorer")
    ]
    session = join(run=RUN, role="rollout", log=log, worker="rollout-0", model=None, stop=threading.Event())
    assert session is not None
    try:
        with publishing(bootstrap, every_s=chosen.every) as swap:
            os.sched_setaffinity(0, [first])
            return *windows(session, chosen, directory / "model", swap), parameters
    finally:
        for process in others:
            process.terminate()
        for process in others:
            process.wait(30)
        embedded.stop()


def windows(
    session: Session, chosen: argparse.Namespace, model: Path, swap: Callable[[bool], None]
) -> tuple[dict[str, list[float]], list[float]]:
    """Let the ways alternate."""
    from penstock.pipeline.runtime.factories import make_engine

    engine: Any = make_engine(session.config)
    longest = chosen.tokens + 32
    alone = open_bare(str(model), concurrency=chosen.concurrency, longest=longest, engine_process=chosen.engine_process)
    weights = WeightPrefetch(session.log, session.run)
    worker = GroupWorker.open(session, engine, weights)
    seen: list[list[int]] = []
    submit = engine.submit
    engine.submit = lambda request: (seen.append(request.prompt_ids.tolist()), submit(request))[1]
    acknowledged = Acknowledged(session)
    until = time.monotonic() + 5.0
    while time.monotonic() < until or len(seen) < chosen.concurrency // 8:
        worker.turn()

    def prompts() -> Iterator[list[int]]:
        while True:
            yield from list(seen)

    bare = Bare(alone, prompts(), tokens=chosen.tokens, rows=chosen.concurrency)
    rates: dict[str, list[float]] = {way: [] for way in WAYS}
    stalls: list[float] = []
    for number in range(-1, chosen.rounds):  # the first round is not counted
        for way in WAYS[number % 4 :] + WAYS[: number % 4]:
            engine._keep = way == "keep"
            swap(way in ("keep", "recompute"))
            rate, stalled = window(way, worker, bare, acknowledged, seconds=chosen.seconds, settle_s=3.0 if chosen.engine_process else 1.0)
            swap(False)
            if number >= 0:
                rates[way].append(rate)
                stalls += stalled if way == "keep" else []
    worker.close()
    weights.close()
    alone.engine_core.shutdown()
    engine.close()
    return rates, stalls


def window(
    way: str, worker: GroupWorker, bare: Bare, acknowledged: Acknowledged, *, seconds: float, settle_s: float
) -> tuple[float, list[float]]:
    """(tokens per second, milliseconds of each swap) of some seconds, once another engine has had `settle_s` to end what it had."""
    turn: Callable[[], int | None] = bare.turn if way == "bare" else worker.turn
    until = time.monotonic() + settle_s
    while time.monotonic() < until:
        turn()
    engine, stalls = worker.engine, list[float]()
    loads = engine.stats()["loads"]
    before, ended, began = acknowledged.tokens(), 0, time.monotonic()
    while (now := time.monotonic()) < began + seconds:
        ended += turn() or 0
        worker.session.reporter.status()  # a worker that says nothing gets no prompts
        if way != "bare" and (stats := engine.stats())["loads"] > loads:
            loads = stats["loads"]
            stalls.append(1000 * stats["swap_stall_last_s"])
    tokens = ended if way == "bare" else acknowledged.tokens() - before
    return tokens / (now - began), stalls


def main() -> None:
    """Measure, print figures and limits; ends with 1 when a limit is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each window")
    parser.add_argument("--tokens", type=int, default=160, help="longest completion")
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--size", choices=list(SIZES), default="tiny")
    parser.add_argument("--every", type=float, default=0.5, help="seconds between swaps")
    parser.add_argument("--engine-process", action="store_true", help="vLLM in processes of their own, bare vLLM too")
    parser.add_argument("--publish", metavar="BOOTSTRAP", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.publish:
        publish(chosen.publish, every_s=chosen.every)
        return
    with tempfile.TemporaryDirectory(prefix="throughput-") as name:
        rates, stalls, parameters = measure(chosen, Path(name))
    print(f"{parameters / 1e6:.2f} M parameters, {chosen.concurrency} rows, {chosen.rounds} rounds, load {os.getloadavg()[0]:.1f}")
    print(f"{'way':<12}{'tokens/s':>10}{'ratio':>8}   against")
    found = {}
    for way, others in (("bare", None), ("worker", "bare"), ("keep", "worker"), ("recompute", "worker")):
        line = f"{way:<12}{statistics.median(rates[way]):>10.0f}"
        if others is not None:
            found[way] = statistics.median(one / other for one, other in zip(rates[way], rates[others], strict=True))
            line += f"{found[way]:>8.3f}   {others}"
        print(line)
    found["stall_ms"] = statistics.median(stalls) if stalls else float("inf")
    print(f"{len(stalls)} swaps with keep: stall {found['stall_ms']:.1f} ms (median), {max(stalls, default=0.0):.1f} ms at most")
    kept = {name: found[name] <= limit if name == "stall_ms" else found[name] >= limit for name, limit in LIMITS.items()}
    for name, limit in LIMITS.items():
        print(f"{'kept' if kept[name] else 'MISSED':<8}{name} {found[name]:.3f}, limit {limit}")
    raise SystemExit(0 if all(kept.values()) else 1)


if __name__ == "__main__":
    main()
