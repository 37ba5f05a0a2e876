"""A rollout worker on vLLM against bare vLLM on the same prompts: acknowledged tokens per second, with and without weight updates.

    python -m benchmarks speed vllm --rounds 5 --seconds 8

One process generates; four variants alternate in windows of some seconds: vLLM's own `LLMEngine` driven directly, the rollout worker with
everything it does (prompts from Kafka, samples to Kafka, commits, statuses), and the worker with new weights every half second, which
another process publishes, with the KV cache kept or recomputed. Feeder, scorer and broker are separate processes on the other cores.
The engine's rows are full throughout each window. Ratios are taken within a round, figures are medians over the rounds.
"""

import argparse
import atexit
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.support.command import PENSTOCK, command_of, own_broker, parser_of, processes, with_numbers
from benchmarks.support.random_model import SIZES, make_model
from penstock.infra.engines.base import EngineSettings
from penstock.infra.engines.vllm.start import check_installed, engine_arguments, start_vllm
from penstock.infra.kafka.log import KafkaLog
from penstock.infra.tensors.stream import TensorBytes
from penstock.pipeline.config.load import Config, from_table
from penstock.pipeline.launch.create import create
from penstock.pipeline.learner.ledger_history import read_ledger_history
from penstock.pipeline.learner.policy_trainer import Weights
from penstock.pipeline.runtime.session import Session, join
from penstock.pipeline.runtime.weights.receive import WeightPrefetch
from penstock.workers.rollout.worker import GroupWorker
from penstock.workers.trainer.run_writer import RunWriter

RUN = "throughput"
LIMITS = {"worker": 0.95, "keep": 0.88, "stall_ms": 100.0}
VARIANTS = ("bare", "worker", "keep", "recompute")


def config_of(model: Path, chosen: argparse.Namespace, bootstrap: str) -> Config:
    """A run that admits as much as the worker can generate; a sample ends at its length or a stop id."""
    return from_table({
        "run": {"steps": 100_000}, "model": {"path": str(model)},
        "data": {"source": "tiny:successor", "size": 256, "max_prompt_tokens": 32},
        "schedule": {
            "mode": "in_flight", "prompts_per_step": 8, "samples_per_prompt": 8, "max_lag": 100_000, "max_drops_per_step": 10_000_000,
        },
        "sampling": {"max_new_tokens": chosen.tokens},
        "rollout": {"engine": "vllm", "workers": 1, "concurrency": chosen.concurrency, "engine_process": chosen.engine_process},
        "trainer": {"export": False, "checkpoint_every": 0}, "kafka": {"bootstrap": bootstrap}, "mlflow": {"enabled": False},
    })  # fmt: skip


def open_bare(directory: Path, *, concurrency: int, longest: int, engine_process: bool, dtype: str = "auto") -> Any:
    """vLLM alone with the same arguments, its statistics off."""
    on_cpu = check_installed("auto")
    settings = EngineSettings(directory=directory, concurrency=concurrency, longest=longest, engine_process=engine_process, dtype=dtype)
    arguments = engine_arguments(settings, on_cpu=on_cpu)
    llm, scratch = start_vllm(arguments | {"disable_log_stats": True}, threads=1, engine_process=engine_process, on_cpu=on_cpu)
    atexit.register(shutil.rmtree, scratch, ignore_errors=True)
    return llm


class Acknowledged:
    """Counts the tokens of samples that the broker has acknowledged."""

    def __init__(self, session: Session) -> None:
        self._pending, self._tokens, self._send = list[tuple[Any, int]](), 0, session.producer.send
        session.producer.send = self._watched  # type: ignore[method-assign]

    def _watched(self, outgoing: Any) -> Any:
        pending = self._send(outgoing)
        if outgoing.topic.endswith(".rollouts"):
            tokens = int(next(value for name, value in outgoing.headers if name == "tokens"))
            self._pending.append((pending, tokens))
        return pending

    def tokens(self) -> int:
        """Tokens acknowledged so far."""
        self._tokens += sum(tokens for pending, tokens in self._pending if pending.done())
        self._pending = [(pending, tokens) for pending, tokens in self._pending if not pending.done()]
        return self._tokens


class Bare:
    """vLLM alone, its rows full, with the logprob of every token and no seeds; `stops`: the model's own end also ends a sample."""

    def __init__(self, llm: Any, prompts: Iterator[list[int]], *, tokens: int, rows: int, stops: bool = False) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self._llm, self._prompts, self._rows, self._number, self._in_flight = llm, prompts, rows, 0, 0
        self._parameters: Callable[[], Any] = lambda: SamplingParams(
            temperature=1.0, max_tokens=tokens, ignore_eos=not stops, stop_token_ids=[2], logprobs=0, flat_logprobs=True, detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )  # fmt: skip

    def turn(self) -> int:
        """One step; tokens of the samples that ended with it."""
        while self._in_flight < self._rows:
            prompt = next(self._prompts)
            for _ in range(8):
                self._llm.add_request(str(self._number), {"prompt_token_ids": prompt}, self._parameters())
                self._number += 1
                self._in_flight += 1
        ended = [output for output in self._llm.step() if output.finished]
        self._in_flight -= len(ended)
        return sum(len(output.outputs[0].token_ids) for output in ended)


@contextmanager
def publishing(bootstrap: str, *, every_s: float) -> Iterator[Callable[[bool], None]]:
    """Another process that publishes new versions while the yielded function was last called with True."""
    command = [*command_of(__name__), "--publish", bootstrap, "--every", str(every_s)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        if not process.stdout.readline():
            raise SystemExit("the publisher exited before version 0 was published")

        def swap(on: bool) -> None:
            assert process.stdin is not None
            print("on" if on else "off", file=process.stdin, flush=True)

        try:
            yield swap
        finally:
            process.stdin.close()
            process.wait(30)


def publish(bootstrap: str, *, every_s: float) -> None:
    """Publish in the trainer's place: version 0 at once, then one every `every_s` while the last line of the input is "on"."""
    from safetensors.numpy import load_file

    log = KafkaLog(bootstrap, client_id="publisher")
    session = join(run=RUN, role="trainer", log=log, worker="trainer", model=None, stop=threading.Event())
    assert session is not None
    writer = RunWriter(session, log.transactions(f"{RUN}.trainer"), read_ledger_history(log, RUN).ledger_state)
    writer.write("run-opened", details="{}")
    weights = load_file(Path(session.config.model.path) / "model.safetensors")

    def version_of(number: int) -> list[TensorBytes]:
        scale = np.float32(1.0 + 0.01 * (number % 2))
        return [
            TensorBytes(name=name, dtype="float32", shape=value.shape, data=(value * scale).tobytes()) for name, value in weights.items()
        ]

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
        version, started = version + 1, time.monotonic()
        writer.publish(Weights(partial(version_of, version)), version=version, step=version)
        writer.finish_publishing()
        time.sleep(max(0.0, every_s - (time.monotonic() - started)))


def measure(chosen: argparse.Namespace, directory: Path, bootstrap: str, core: int) -> tuple[dict[str, list[float]], list[float], int]:
    """(tokens per second by variant, milliseconds of each update with `keep`, the model's parameters)."""
    parameters = make_model(directory / "model", size=chosen.size)
    log = KafkaLog(bootstrap, client_id="bench")
    create(config_of(directory / "model", chosen, bootstrap), log=log, run_id=RUN, notify=lambda _: None)
    session = join(run=RUN, role="rollout", log=log, worker="rollout-0", model=None, stop=threading.Event())
    assert session is not None
    others = {role: [*PENSTOCK, "worker", role, "--run", RUN, "--bootstrap", bootstrap] for role in ("feeder", "scorer")}
    with processes(others, directory), publishing(bootstrap, every_s=chosen.every) as swap:
        os.sched_setaffinity(0, [core])
        return *windows(session, chosen, directory / "model", swap), parameters


def windows(
    session: Session, chosen: argparse.Namespace, model: Path, swap: Callable[[bool], None]
) -> tuple[dict[str, list[float]], list[float]]:
    """Alternate the variants."""
    from penstock.pipeline.runtime.factories import make_engine

    engine: Any = make_engine(session.config)
    longest = chosen.tokens + 32
    alone = open_bare(model, concurrency=chosen.concurrency, longest=longest, engine_process=chosen.engine_process)
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
    rates: dict[str, list[float]] = {name: [] for name in VARIANTS}
    stalls: list[float] = []
    for number in range(-1, chosen.rounds):  # the first round is not counted
        for name in VARIANTS[number % 4 :] + VARIANTS[: number % 4]:
            engine._keep = name == "keep"
            swap(name in ("keep", "recompute"))
            rate, stalled = window(name, worker, bare, acknowledged, seconds=chosen.seconds, settle_s=3.0 if chosen.engine_process else 1.0)
            swap(False)
            if number >= 0:
                rates[name].append(rate)
                stalls += stalled if name == "keep" else []
    worker.close()
    weights.close()
    alone.engine_core.shutdown()
    engine.close()
    return rates, stalls


def window(
    name: str, worker: GroupWorker, bare: Bare, acknowledged: Acknowledged, *, seconds: float, settle_s: float
) -> tuple[float, list[float]]:
    """(tokens per second, milliseconds of each update) of some seconds, after `settle_s` in which rows of the last variant end."""
    turn: Callable[[], int | None] = bare.turn if name == "bare" else worker.turn
    until = time.monotonic() + settle_s
    while time.monotonic() < until:
        turn()
    engine, stalls = worker.engine, list[float]()
    loads = engine.stats()["loads"]
    before, ended, started = acknowledged.tokens(), 0, time.monotonic()
    while (now := time.monotonic()) < started + seconds:
        ended += turn() or 0
        worker.session.reporter.status()  # a silent worker gets no prompts
        if name != "bare" and (stats := engine.stats())["loads"] > loads:
            loads = stats["loads"]
            stalls.append(1000 * stats["swap_stall_last_s"])
    tokens = ended if name == "bare" else acknowledged.tokens() - before
    return tokens / (now - started), stalls


def main(arguments: Sequence[str]) -> int:
    """Measure, print figures and limits; 1 if a limit is missed."""
    parser = parser_of(__name__, __doc__)
    with_numbers(parser, rounds=5, seconds=8.0, tokens=160, concurrency=64)
    parser.add_argument("--size", choices=list(SIZES), default="tiny")
    parser.add_argument("--every", type=float, default=0.5, help="seconds between updates")
    parser.add_argument("--engine-process", action="store_true", help="both vLLM engines in processes of their own")
    parser.add_argument("--publish", metavar="BOOTSTRAP", help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.publish:
        publish(chosen.publish, every_s=chosen.every)
        return 0
    core, *others = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, others or [core])  # the broker and the other processes inherit it
    with own_broker("throughput") as (directory, broker):
        rates, stalls, parameters = measure(chosen, directory, broker.bootstrap, core)
    print(f"{parameters / 1e6:.2f} M parameters, {chosen.concurrency} rows, {chosen.rounds} rounds, load {os.getloadavg()[0]:.1f}")
    print(f"{'variant':<12}{'tokens/s':>10}{'ratio':>8}   against")
    figures = {}
    for name, base in (("bare", None), ("worker", "bare"), ("keep", "worker"), ("recompute", "worker")):
        line = f"{name:<12}{statistics.median(rates[name]):>10.0f}"
        if base is not None:
            figures[name] = statistics.median(rate / other for rate, other in zip(rates[name], rates[base], strict=True))
            line += f"{figures[name]:>8.3f}   {base}"
        print(line)
    figures["stall_ms"] = statistics.median(stalls) if stalls else float("inf")
    print(f"{len(stalls)} updates with keep: stall {figures['stall_ms']:.1f} ms (median), {max(stalls, default=0.0):.1f} ms at most")
    missed = [name for name, limit in LIMITS.items() if (figures[name] > limit if name == "stall_ms" else figures[name] < limit)]
    for name, limit in LIMITS.items():
        print(f"{'MISSED' if name in missed else 'passed':<8}{name} {figures[name]:.3f}, limit {limit}")
    return int(bool(missed))
