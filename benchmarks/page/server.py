"""`penstock ui` on a finished run with very many groups while another run trains: paint, lists, SQL, memory, and what a page costs a run.

    python -m benchmarks page server
    python -m benchmarks page server --groups 50000 --home STATE --pairs 0

Writes the groups to a broker of its own, with the saved view and the index that a tracker would leave; `--home` keeps them. Then
`penstock run` of the configuration starts, and the pages are opened in Chromium and requested alone: medians of `--repeats`. `--pairs`
times the same run is made without and with its page open, in turn.
"""

import contextlib
import json
import statistics
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psutil
from confluent_kafka import Producer

from benchmarks.support.command import PENSTOCK, ROOT, launched, own_broker, parser_of, with_numbers, with_settings
from benchmarks.topics_overhead.index import BLOCK, folded, repeated
from penstock.infra.kafka.log import KafkaLog
from penstock.infra.kafka.settings import librdkafka
from penstock.infra.paths import run_directory
from penstock.pipeline.archive.index.group_rows import steps_table
from penstock.pipeline.archive.index.segments import FOLDER, Segments
from penstock.pipeline.inspect.live.saved_view import ViewWriter
from penstock.pipeline.inspect.run_view import RunView
from penstock.pipeline.inspect.run_view_types import Tally
from penstock.pipeline.scheduling.rules import IdSet
from penstock.topics import groups, ledger, prompts
from penstock.topics.catalogue import RUNS_SPEC, RUNS_TOPIC, topics_of
from penstock.topics.wire.headers import Headers
from penstock.topics.wire.record import Outgoing, Record
from tests.support.a_run import RecordBuilder, as_records
from tests.support.browser import browser

RUN, BESIDE = "many", "beside"
PARTITIONS, PER_STEP, TEMPLATES = 4, 1000, 64
READ_S = 3.0
QUERIES = {"count": "select count(*) from groups", "means by status": "select status, avg(reward_mean) from groups group by 1"}


class Writer:
    """Sends the records of the run and folds them into a view, as its tracker does."""

    def __init__(self, log: KafkaLog) -> None:
        self.log, self.view, self.ends = log, RunView(run=RUN), dict[tuple[str, int], int]()
        self._producer = Producer({**librdkafka(log.connection), "linger.ms": 20, "queue.buffering.max.messages": 1_000_000})

    def send(self, outgoing: Outgoing, *, fold: bool = True) -> None:
        """Send a record and fold it."""
        tp = outgoing.topic, outgoing.partition
        offset = self.ends[tp] = self.ends.get(tp, -1) + 1
        while True:
            try:
                self._producer.produce(tp[0], outgoing.value, outgoing.key, tp[1], headers=list(outgoing.headers))
                break
            except BufferError:
                self._producer.poll(0.1)
        if fold:
            at = {"topic": tp[0], "partition": tp[1], "offset": offset, "timestamp_ms": int(1000 * time.time())}
            self.view.fold(Record(**at, key=outgoing.key, headers=outgoing.headers, value=bytes(outgoing.value)))

    def count(self, step: int, members: Sequence[int], reward: float) -> None:
        """Count groups whose records were not folded, as the view counts those that it has forgotten: folding takes minutes."""
        past = self.view.past
        for group in members:
            self.view.admitted.add(group)
            past.groups.add(group)
            past.settle(group, "trained")
        past.outcomes["scored"] += len(members)
        self.view.rewards[step] = Tally(4 * len(members), 4 * len(members) * reward)

    def flush(self) -> None:
        """Wait for the broker, and forget what the tracker would forget."""
        self._producer.flush()
        self.view.forget()


def numbered(outgoing: Outgoing, headers: Headers, group: int) -> Outgoing:
    """A record as that of another group: its payload keeps its number."""
    return replace(outgoing, partition=group % PARTITIONS, key=b"%d" % group, headers=replace(headers, group=group).encode(outgoing.value))


def write(log: KafkaLog, count: int) -> None:
    """The run's records, its saved view and its index. The last step's groups are encoded, those before repeat `TEMPLATES` payloads."""
    log.create_topics({RUNS_TOPIC: RUNS_SPEC, **topics_of(RUN, partitions=PARTITIONS)})
    steps = count // PER_STEP
    builder, writer = RecordBuilder(RUN, steps=steps, created_s=time.time() - steps), Writer(log)
    for outgoing in (builder.made(), builder.record(), builder.opened(), builder.version(0)):
        writer.send(outgoing)
    pairs = []
    for number in range(TEMPLATES):
        prompt, *_, outcome = builder.group([number % 3 / 2, 0.5, 1.0, 0.0], version=0)
        checked = [check(as_records([each])[0], run=RUN) for check, each in ((prompts.check, prompt), (groups.check, outcome))]
        pairs.append(((prompt, checked[0]), (outcome, checked[1])))
    for step in range(steps):
        first = step * PER_STEP
        begun = builder.now_s
        for number in range(first, first + PER_STEP):
            if step == steps - 1:
                builder.next_group = number
                made = builder.group([number % 5 / 4, 0.5, 1.0, 0.0], version=step)
                for outgoing in (made[0], made[-1]):
                    writer.send(replace(outgoing, partition=number % PARTITIONS))
            else:
                for outgoing, headers in pairs[number % TEMPLATES]:
                    version = {} if headers.policy_version_min is None else {"policy_version_min": step, "policy_version_max": step}
                    writer.send(numbered(outgoing, replace(headers, **version), number), fold=False)
        if step < steps - 1:
            writer.count(step, range(first, first + PER_STEP), step / steps)
        writer.send(builder.measured_by("rollout-0", version=step, samples=4.0 * first, tokens=12.0 * first, cpu_s=float(step)))
        builder.now_s += 1.0
        writer.send(builder.step(step, list(range(first, first + PER_STEP)), begun_s=begun, reward=step / steps))
        writer.send(builder.version(step + 1))
        writer.flush()
    writer.send(builder.closed())
    writer.send(builder.record("finished"))
    writer.flush()
    ends = {tp: last + 1 for tp, last in writer.ends.items() if tp[0] not in (RUNS_TOPIC, f"{RUN}.run")}
    producer = log.producer()
    saved = ViewWriter(log, producer, "tracker").write(writer.view, ends, now=True)
    assert saved is not None
    saved.offset(60.0)
    producer.close()
    index(log, builder, ends, steps * PER_STEP)


def index(log: KafkaLog, builder: RecordBuilder, ends: dict[tuple[str, int], int], count: int) -> None:
    """The files that the tracker would leave in the run's folder."""
    directory = run_directory(RUN) / FOLDER
    directory.mkdir(parents=True)
    table, _ = folded(as_records(list(RecordBuilder(steps=500).whole())))
    done = IdSet()
    for number in range(count):
        done.add(number)
    topics = [
        [topic.removeprefix(f"{RUN}."), number, end] for (topic, number), end in ends.items() if topic.endswith((".prompts", ".groups"))
    ]
    state: dict[str, Any] = {"closed": True, "seq": builder.seq - 1, "ledger": ends[f"{RUN}.ledger", 0], "positions": topics}
    files, steps = (Segments(directory / name, str(builder.created_ns)) for name in ("groups", "steps"))
    files.lock()
    for first in range(0, count, BLOCK):
        rows = repeated(table, first, min(BLOCK, count - first), partitions=PARTITIONS, per_step=PER_STEP)
        files.append(rows, {**state, "done": done.as_json()})
    files.close()
    tail = log.tail({(f"{RUN}.ledger", 0): "earliest"})
    entries = [ledger.read(record, run=RUN)[1] for record in tail.read_to_end()]
    tail.close()
    steps.lock()
    steps.append(steps_table([entry for entry in entries if entry.kind == "step"]), state)
    steps.close()


@contextlib.contextmanager
def served(bootstrap: str) -> Iterator[tuple[str, psutil.Process]]:
    """(address, process) of a `penstock ui` that has just been started."""
    command = [*PENSTOCK, "ui", "--port", "0", "--bootstrap", bootstrap]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip(), psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(60)


def requested(address: str) -> tuple[float, int]:
    """(seconds, bytes) of one request."""
    started = time.perf_counter()
    with urllib.request.urlopen(address) as response:
        size = len(response.read())
    return time.perf_counter() - started, size


def asked(address: str) -> tuple[float, int]:
    """(seconds, bytes) of a query, after the time in which a person reads the result of the one before."""
    time.sleep(READ_S)
    return requested(address)


def memory_mb(process: psutil.Process) -> float:
    """Own memory of a process and its children."""
    return sum(each.memory_full_info().uss for each in [process, *process.children(recursive=True)]) / 1e6


def cpu_s(process: psutil.Process) -> float:
    """CPU seconds of a process and its children."""
    return sum(sum(each.cpu_times()[:2]) for each in [process, *process.children(recursive=True)])


PAINT = """() => ({paint: performance.getEntriesByName("first-contentful-paint")[0].startTime,
  bytes: [...performance.getEntriesByType("navigation"), ...performance.getEntriesByType("resource")]
    .reduce((sum, one) => sum + one.transferSize, 0)})"""


def painted(page: Any, address: str, shown: str) -> tuple[float, float, float]:
    """(ms to the first paint, ms until `shown` is there, bytes) of a page in a browser."""
    started = time.perf_counter()
    page.goto(address, wait_until="commit")
    page.wait_for_selector(shown, timeout=300_000)
    elapsed = 1000 * (time.perf_counter() - started)
    page.wait_for_function("() => performance.getEntriesByName('first-contentful-paint').length > 0")
    found = page.evaluate(PAINT)
    return found["paint"], elapsed, found["bytes"]


def median_of(repeats: int, measure: Callable[[], Sequence[float]]) -> list[float]:
    """Medians of what each call measures."""
    return [statistics.median(column) for column in zip(*(measure() for _ in range(repeats)), strict=True)]


def pages(address: str, process: psutil.Process, repeats: int) -> dict[str, Any]:
    """Figures of all pages of the large run."""
    run = f"{address}r/{RUN}"
    figures: dict[str, Any] = {"memory at the start, MB": memory_mb(process)}
    figures["Run, first request, ms"] = 1000 * requested(run)[0]
    figures["list, first request, ms"] = 1000 * requested(f"{run}/groups")[0]
    with browser() as chromium:
        page = chromium.new_page(viewport={"width": 1440, "height": 900})
        for name, path, shown in (("Run", "", "canvas"), ("Samples", "/samples", "#list .row")):
            paint, ready, size = median_of(repeats, lambda path=path, shown=shown: painted(page, run + path, shown))
            figures |= {f"{name}, first paint, ms": paint, f"{name}, ready, ms": ready, f"{name}, kB": size / 1000}
        page.close()
    following = json.loads(urllib.request.urlopen(f"{run}/groups").read())["next"]
    lists = {
        "next page": f"after={quote(following)}",
        "filter by status and reward": "status=trained&reward=0..0.1",
        "worst first": "sort=worst",
        "filter by step": "step=10..12",
    }
    for name, query in lists.items():
        seconds, size = median_of(repeats, lambda query=query: requested(f"{run}/groups?{query}"))
        figures |= {f"{name}, ms": 1000 * seconds, f"{name}, kB": size / 1000}
    newest = json.loads(urllib.request.urlopen(f"{run}/groups").read())["rows"][0]["group"]
    figures["a group's tokens, ms"] = 1000 * median_of(repeats, lambda: requested(f"{run}/g/{newest}/data"))[0]
    for name, query in QUERIES.items():
        figures[f"SQL, {name}, ms"] = 1000 * median_of(repeats, lambda query=query: asked(f"{run}/sql?q={quote(query)}"))[0]
    return figures | {"memory at the end, MB": memory_mb(process)}


def cost(config: str, settings: Sequence[str], home: Path, bootstrap: str, pairs: int) -> dict[str, float]:
    """Wall seconds of a run without and with its page open, in turn, and the CPU seconds of the server."""
    walls: dict[bool, list[float]] = {False: [], True: []}
    used: list[float] = []
    with served(bootstrap) as (address, process), browser() as chromium:
        for number in range(2 * pairs):
            opened, run = bool(number % 2), f"pair-{number}-{int(time.time()):x}"
            started, cpu = time.monotonic(), cpu_s(process)
            with launched(config, run, settings, home / f"{run}.txt") as running:
                if opened:
                    page = chromium.new_page()
                    while running.poll() is None:
                        with contextlib.suppress(Exception):
                            if page.goto(f"{address}r/{run}", wait_until="load").ok:
                                break
                        time.sleep(0.2)
                running.wait()
            report = json.loads((run_directory(run) / "report.json").read_text())
            walls[opened].append(report["time"]["wall_s"])
            print(
                f"{'with' if opened else 'without'} its page {walls[opened][-1]:.2f} s, {time.monotonic() - started:.1f} s in all",
                flush=True,
            )
            if opened:
                used.append(cpu_s(process) - cpu)
                page.close()
    without, with_page = statistics.median(walls[False]), statistics.median(walls[True])
    return {
        "run without its page, s": without,
        "run with its page open, s": with_page,
        "difference, %": 100 * (with_page - without) / without,
        "server's CPU a run, s": statistics.median(used),
    }


def main(arguments: Sequence[str]) -> None:
    """Make the run, measure the pages beside another run, and then what a page costs."""
    parser = parser_of(__name__, __doc__)
    parser.add_argument("config", nargs="?", default=str(ROOT / "examples" / "demo.toml"))
    parser.add_argument("--home", type=Path, help="state directory to use and keep")
    with_numbers(parser, groups=1_000_000, repeats=5, pairs=4)
    with_settings(parser)
    chosen = parser.parse_args(arguments)
    with own_broker("page", chosen.home) as (home, broker):
        with contextlib.closing(KafkaLog(broker.bootstrap, client_id="page")) as log:
            if log.partitions(f"{RUN}.run") is None:
                started = time.monotonic()
                write(log, chosen.groups)
                print(f"{chosen.groups:,} groups written in {time.monotonic() - started:.0f} s", flush=True)
        with launched(chosen.config, f"{BESIDE}-{int(time.time()):x}", chosen.settings, home / "beside.txt") as beside:
            while " reward " not in (home / "beside.txt").read_text() and beside.poll() is None:
                time.sleep(0.2)
            with served(broker.bootstrap) as (address, process):
                figures = pages(address, process, chosen.repeats)
            print(f"the run beside them {'trains still' if beside.poll() is None else 'has ended'}")
            for name, value in figures.items():
                print(f"{name:36}{value:>12,.1f}", flush=True)
        if chosen.pairs:
            for name, value in cost(chosen.config, chosen.settings, home, broker.bootstrap, chosen.pairs).items():
                print(f"{name:36}{value:>12,.2f}")
