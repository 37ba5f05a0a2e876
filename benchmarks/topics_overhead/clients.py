"""Many clients without models on one broker: time to join, time of a rebalance, latency, memory; then what the feeder reads of a group.

    python -m benchmarks topics_overhead clients --clients 50 200 1000
    python -m benchmarks topics_overhead clients --clients 1000 --session 60

A client is what a rollout worker is to the broker: a member of the consumer group on `prompts` and a producer for `rollouts` and a status a
second, both as the product makes them, in few processes. This process writes prompts at a constant rate, and reads the records that
clients answer with. A rebalance is timed when one member leaves, until all others have their new partitions. The broker is the embedded
one, fresh for each number of clients, with its 512 MB of heap. The last line compares the bytes of a scored group with its headers: feeder
and tracker read `groups` for the headers, and Kafka delivers whole records.
"""

import argparse
import multiprocessing
import resource
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.support.command import own_broker, parser_of, with_numbers
from penstock.infra.broker import embedded

RUN = "clients"
PROMPTS, ROLLOUTS, METRICS, GROUPS = (f"{RUN}.{topic}" for topic in ("prompts", "rollouts", "metrics", "groups"))
LIMIT_S = 300.0
ANSWER_BYTES, STATUS_BYTES, PROMPT_BYTES = 4_000, 2_500, 1_500
HEADERS = tuple((f"header-{number}", b"0" * 8) for number in range(10))
COLUMNS = (
    "clients", "partitions", "join s", "rebalance s", "p50 ms", "p99 ms", "lost", "rejoins", "broker MB", "broker cores", "client cores"
)  # fmt: skip
SPAWN = multiprocessing.get_context("spawn")


def main(arguments: Sequence[str]) -> int:
    """Print a line for each number of clients."""
    parser = parser_of(__name__, __doc__)
    parser.add_argument("--clients", type=int, nargs="+", default=[50, 200, 1000])
    with_numbers(parser, processes=4, partitions=0, session=6.0, rate=50.0, seconds=20.0)
    chosen = parser.parse_args(arguments)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    print(f"session {chosen.session:g} s, {chosen.rate:g} prompts/s, {hard} file descriptors a process ({soft} before)")
    print("".join(f"{name:>{len(name) + 2}}" for name in COLUMNS))
    complete = True
    for count in chosen.clients:
        with own_broker(RUN) as (home, info):
            complete &= measure(home, info.bootstrap, count, chosen)
    with own_broker(RUN) as (_, info):
        feeder(info.bootstrap)
    return int(not complete)


def measure(home: Path, bootstrap: str, count: int, chosen: argparse.Namespace) -> bool:
    """One number of clients; False if they did not all join, or records were lost."""
    from penstock.infra.kafka.log import KafkaLog

    log = KafkaLog(bootstrap, client_id=RUN)
    partitions = chosen.partitions or count
    make_topics(log, partitions)
    state = {name: SPAWN.Array("d", count) for name in ("owned", "joins", "leave")}
    shares = np.array_split(range(count), min(chosen.processes, count))
    children = [SPAWN.Process(target=clients, args=(bootstrap, share.tolist(), chosen.session, state), daemon=True) for share in shares]
    started = time.monotonic()
    for child in children:
        child.start()
    try:
        joined_s = wait(lambda: sum(state["owned"]) == partitions and min(state["owned"]) > 0, started)
        if joined_s is None:
            some, joins = int((np.array(state["owned"]) > 0).sum()), int(sum(state["joins"]))
            print(f"{count} clients: {some} own partitions after {LIMIT_S:g} s and {joins} assignments", flush=True)
            return False
        time.sleep(5.0)
        state["joins"][:] = [0.0] * count
        broker_pid, pids = embedded.status(home).pid, [process.pid for process in children]
        before = [cpu_s(broker_pid), sum(map(cpu_s, pids))]
        latencies, lost, took_s = traffic(log, partitions, rate=chosen.rate, seconds=chosen.seconds)
        rejoins = int(sum(state["joins"]))
        cores = [(now - then) / took_s for now, then in zip([cpu_s(broker_pid), sum(map(cpu_s, pids))], before, strict=True)]
        memory = psutil.Process(broker_pid).memory_info().rss / 1e6
        state["joins"][:] = [0.0] * count
        state["leave"][0], left = 1.0, time.monotonic()
        moved_s = wait(lambda: sum(state["owned"][1:]) == partitions and min(state["joins"][1:]) >= 1, left)
        p50, p99 = np.percentile(latencies or [float("nan")], [50, 99])
        moved = "never" if moved_s is None else f"{moved_s:.1f}"
        used = [f"{core:.2f}" for core in cores]
        cells = (count, partitions, f"{joined_s:.1f}", moved, f"{p50:.0f}", f"{p99:.0f}", lost, rejoins, f"{memory:.0f}", *used)
        print("".join(f"{cell!s:>{len(name) + 2}}" for name, cell in zip(COLUMNS, cells, strict=True)), flush=True)
        return not lost and moved_s is not None
    finally:
        for child in children:
            child.kill()
        for child in children:
            child.join()
        log.close()


def make_topics(log: Any, partitions: int) -> None:
    from penstock.topics.catalogue import topics_of

    specs = topics_of(RUN, partitions=partitions)
    log.create_topics({name: specs[name] for name in (PROMPTS, ROLLOUTS, METRICS)})


def wait(holds: Any, since: float) -> float | None:
    """Seconds from `since` until it holds; None after the limit."""
    while not holds():
        if time.monotonic() - since > LIMIT_S:
            return None
        time.sleep(0.05)
    return time.monotonic() - since


def cpu_s(pid: Any) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def traffic(log: Any, partitions: int, *, rate: float, seconds: float) -> tuple[list[float], int, float]:
    """Milliseconds from each prompt to its answer in `rollouts`, prompts without an answer, and the seconds it took."""
    from penstock.topics.wire.record import Outgoing

    tail = log.tail({(ROLLOUTS, partition): "latest" for partition in range(partitions)})
    producer, waiting, latencies, sent, started = log.producer(), dict[bytes, float](), list[float](), 0, time.monotonic()
    while time.monotonic() - started < seconds or (waiting and time.monotonic() - started < seconds + 30):
        if time.monotonic() - started < seconds and sent < rate * (time.monotonic() - started):
            key = str(sent).encode()
            waiting[key] = time.monotonic()
            prompt = Outgoing(topic=PROMPTS, partition=sent * 7919 % partitions, key=key, headers=HEADERS, value=b"p" * PROMPT_BYTES)
            producer.send(prompt)
            sent += 1
        for record in tail.poll(0.005):
            if record.key in waiting:
                latencies.append(1000 * (time.monotonic() - waiting.pop(record.key)))
    tail.close()
    producer.close()
    return latencies, len(waiting), time.monotonic() - started


def clients(bootstrap: str, numbers: list[int], session_s: float, state: dict[str, Any]) -> None:
    """The clients of one process: each answers its prompts and sends a status a second."""
    from penstock.infra.kafka.log import KafkaLog
    from penstock.infra.log import Assigned, Records, Revoked
    from penstock.topics.wire.record import Outgoing

    log = KafkaLog(bootstrap, client_id=RUN, unreachable_after_s=120.0)
    members = {number: log.member(f"{RUN}.rollout", [PROMPTS], session_s=session_s) for number in numbers}
    producers = {number: log.producer() for number in numbers}
    due = {number: time.monotonic() + number / len(numbers) % 1 for number in numbers}
    while True:
        for number, member in list(members.items()):
            for event in member.take(0.0):
                if isinstance(event, Assigned):
                    state["owned"][number] = len(event.partitions)
                    state["joins"][number] += 1
                elif isinstance(event, Revoked):
                    state["owned"][number] = 0
                elif isinstance(event, Records):
                    for record in event.records:
                        answer = Outgoing(
                            topic=ROLLOUTS, partition=record.partition, key=record.key, headers=HEADERS, value=b"r" * ANSWER_BYTES
                        )
                        producers[number].send(answer)
                    newest = {(record.topic, record.partition): (record.offset + 1, "") for record in event.records}
                    member.commit(newest)
            if time.monotonic() > due[number]:
                due[number] += 1.0
                producers[number].send(Outgoing(topic=METRICS, partition=0, key=b"w", headers=HEADERS, value=b"s" * STATUS_BYTES))
            if state["leave"][number]:
                state["leave"][number] = state["owned"][number] = 0.0
                members.pop(number).close()
        time.sleep(0.005)


def feeder(bootstrap: str) -> None:
    """Print the bytes of a group in `groups` and of its headers, and how fast the feeder's reader gets through them."""
    from penstock.infra.kafka.log import KafkaLog
    from penstock.topics import groups
    from penstock.topics.catalogue import topics_of
    from tests.support.a_run import RecordBuilder

    log, builder, count, samples, tokens = KafkaLog(bootstrap, client_id=RUN), RecordBuilder(RUN), 200, 16, 2000
    log.create_topics({GROUPS: topics_of(RUN, partitions=1)[GROUPS]})
    producer = log.producer()
    for _ in range(count):
        producer.send(builder.group([0.0] * samples, version=0, tokens=tokens)[-1])
    producer.flush()
    producer.close()
    tail, read, headers, records = log.tail({(GROUPS, 0): "earliest"}), 0, 0, 0
    started = time.monotonic()
    while records < count:
        for record in tail.poll(1.0):
            groups.check(record, run=RUN)
            records += 1
            needed = len(record.key or b"") + sum(len(name) + len(value) for name, value in record.headers)
            read, headers = read + len(record.value) + needed, headers + needed
    seconds = time.monotonic() - started
    tail.close()
    log.close()
    print(
        f"groups of {samples} x {tokens} tokens: feeder and tracker read {read / count:,.0f} bytes each, {headers / count:,.0f} of "
        f"them headers; a reader of headers gets through {read / seconds / 1e6:,.0f} MB/s, {count / seconds:,.0f} such groups a second"
    )
