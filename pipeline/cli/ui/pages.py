"""The pages of `penstock ui`: each is a function of the runs and of its address, and returns its template and facts."""

import functools
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, cast

import pyarrow.compute as pc
from starlette.datastructures import QueryParams
from starlette.responses import Response

from penstock.infra.errors import ConfigError
from penstock.infra.kafka.log import KafkaLog
from penstock.infra.paths import run_directory
from penstock.pipeline.archive import sql as queries
from penstock.pipeline.archive.database import Limits, prepare
from penstock.pipeline.archive.index.queries import Filters
from penstock.pipeline.archive.index.segments import partition_of
from penstock.pipeline.cli.ui.store import PayloadFilter, Runs, WatchedRun
from penstock.pipeline.inspect.explain import as_json
from penstock.pipeline.inspect.explain.text import as_page
from penstock.pipeline.inspect.records import browse
from penstock.pipeline.inspect.records.runs import list_runs, note_of, own_sizes
from penstock.pipeline.inspect.report.figures import completions
from penstock.pipeline.inspect.report.provenance import README, card_directory
from penstock.pipeline.inspect.run_status import has_ended, status_of
from penstock.pipeline.inspect.run_view import RunView
from penstock.pipeline.inspect.web.index import dead_letter
from penstock.pipeline.inspect.web.run_facts import config_rows, curve, provenance
from penstock.pipeline.launch.run_lock import log_files, timed_lines
from penstock.pipeline.runtime.registration.run_registry import resolve
from penstock.pipeline.runtime.roles import readers, writers
from penstock.topics.dead_letters import read
from penstock.topics.wire.errors import Unusable

Page = tuple[str, dict[str, Any]]


class Address(NamedTuple):
    """The parts of an address that a page reads."""

    runs: Runs
    query: QueryParams
    run: str = ""
    group: int = 0
    topic: str = ""
    ending: str = ""
    writable: bool = False

    @property
    def watched(self) -> WatchedRun:
        return self.runs[self.run]


AT_ONCE = 2
ROWS = 500
_views = functools.cache(queries.views)
DEAD_LETTERS = 200
QUESTION_S = 30.0
"""Longest time that the result of a query is computed."""
RESULT_BYTES = 16 << 20
DOWNLOADED, DOWNLOADED_BYTES = 100_000, 512 << 20
LOG_LINES = 500
COMPARED = 8
ROUNDING = 1e-6
"""A range of the list includes values this close to its ends, as they are shown rounded."""
RECORDS = 50
QUESTIONS: Mapping[str, str] = {
    "worst completions": "select group_id, reward, answer, completion from samples where reward is not null order by reward limit 20",
    "why groups were dropped": "select status, reason, count(*) as n from groups where status <> 'trained' group by all order by 3 desc",
    "truncated completions": "select group_id, sample, tokens, completion from samples where finish = 'length' limit 20",
    "reward by prompt": "select prompt, avg(reward_mean) as reward, count(*) as groups from groups group by 1 order by 2 limit 30",
    "slowest groups": "select group_id, epoch_ms(scored) - epoch_ms(admitted) as ms from groups order by 2 desc nulls last limit 20",
}


def index(address: Address) -> Page:
    """All runs, newest first; several can be chosen to be compared."""
    text, status = address.query.get("q", "").lower(), address.query.get("status", "")
    listed = list(reversed(list_runs(address.runs.log)))
    rows = []
    for row in listed:
        if (text and text not in " ".join(map(str, row.values())).lower()) or (status and row["status"] != status):
            continue
        rows.append({**row, **address.runs.summary(row["run"])._asdict()})
    values = [value for row in rows for value in row["curve"] if value is not None]
    scale = {"low": min(values, default=0.0), "high": max(values, default=1.0)}
    return "runs.html", {"rows": rows, "total": len(listed), "scale": scale, "q": address.query.get("q", ""), "chosen_status": status}


def run(address: Address) -> Page:
    """A run at this moment; its script keeps it up to date."""
    page, view = address.watched.page(), address.watched.update()
    return "run.html", {**page, "provenance": provenance(view), "note": note_of(address.run), "writable": address.writable}


def card(address: Address) -> Page:
    """The run's model card as it is on this machine."""
    path = card_directory(address.run) / README
    if not path.is_file():
        raise ConfigError(f"{address.run} has no card on this machine: penstock card {address.run}")
    return "card.html", {**frame(address), "path": str(path), "text": path.read_text(encoding="utf-8", errors="replace")}


def frame(address: Address) -> dict[str, Any]:
    """What the head of every page of a run shows: status, number of dead letters, and whether the run is live."""
    view = address.watched.update()
    return {"run": address.run, "status": status_of(view), "dead_letter_count": len(view.dead_letters), "live": not has_ended(view)}


def framed(template: str) -> Callable[[Address], Page]:
    """The function of a page whose template needs only `frame`, because its script requests the rest."""
    return lambda address: (template, frame(address))


def _range(query: QueryParams, name: str) -> tuple[float, float] | None:
    """The range LOW..HIGH of an address; either may be missing, and a single number is both."""
    text = query.get(name, "")
    if not text:
        return None
    low, dots, high = text.partition("..")
    try:
        return float(low or "-inf") - ROUNDING, float((high or "inf") if dots else low) + ROUNDING
    except ValueError as error:
        raise ConfigError(f"{name}={text}: expected a number, or LOW..HIGH") from error


def _filters(query: QueryParams) -> tuple[Filters, PayloadFilter]:
    """The filters in an address: those that the index of groups answers, and those for which payloads must be read."""
    where = Filters(
        statuses=tuple(filter(None, query.getlist("status"))),
        reward=_range(query, "reward"),
        step=_range(query, "step"),
        version=_range(query, "version"),
        row=int(row) if (row := query.get("row", "")).isdecimal() else None,
    )
    return where, PayloadFilter(*(query.get(name, "") for name in PayloadFilter._fields))


def groups(address: Address) -> dict[str, Any]:
    """A page of the list of groups, for JSON, with the filters, order and start in the address."""
    query, (where, payload) = address.query, _filters(address.query)
    return address.watched.list_groups(where, payload, order=query.get("sort") or "newest", after=query.get("after") or None)


def histograms(address: Address) -> dict[str, Any]:
    """Histograms of mean reward and length over the groups that the filters in the address select, for JSON."""
    listed, (where, _) = address.watched.groups(), _filters(address.query)
    return {name: listed.histogram(column, where) for name, column in (("reward", "reward_mean"), ("length", "length"))}


def download(address: Address, questions: threading.BoundedSemaphore, gone: Callable[[], bool]) -> Response:
    """The result of the query in the address as a file or, without one, the samples of the groups that its filters select.

    `questions` limits the queries that run at a time; `gone` returns True once the browser has closed the connection.
    """
    if address.ending not in queries.FORMATS:
        raise ConfigError(f"download.{address.ending}: expected one of {', '.join(queries.FORMATS)}")
    sql_text, (where, payload) = address.query.get("q", ""), _filters(address.query)
    limits = Limits(rows=DOWNLOADED + 1, size=DOWNLOADED_BYTES, seconds=QUESTION_S, disconnected=gone)
    if not (own := sql_text.strip()):
        listed = address.watched.groups()
        numbers = listed.numbers("group")[listed.matching(where)]
        sql_text = f"select * from samples where group_id in ({', '.join(f'{number:.0f}' for number in numbers) or 'null'})"
    rows = _result(address.runs, address.run, sql_text, questions, limits)
    if len(rows) > DOWNLOADED:
        raise ConfigError(f"more than {DOWNLOADED:,} rows: narrow the filter, or `penstock topics export {address.run} DIR`")
    if not own and any(payload):
        having = [pc.match_substring(rows[name], payload.text, ignore_case=True) for name in ("prompt", "completion")]
        conditions = [pc.equal(rows[name], value) for name in ("finish", "worker") if (value := getattr(payload, name))]
        rows = rows.filter(functools.reduce(pc.and_, conditions, pc.or_kleene(*having)))
    name = f"{address.run}-{'query' if own else 'samples'}.{address.ending}"
    headers = {"Content-Disposition": f'attachment; filename="{name}"'}
    return Response(queries.as_file(rows, address.ending), media_type=queries.FORMATS[address.ending], headers=headers)


def detail(address: Address) -> dict[str, Any]:
    """A group with texts and tokens, for JSON; of a large group with those of one sample."""
    sample = address.query.get("sample", "")
    return address.watched.detail(address.group, sample=int(sample) if sample.isdecimal() else None)


def group(address: Address) -> Page:
    """A group: its samples, and then its trace, which takes longer to read."""
    if address.watched.row(address.group) is None:
        trace(address)  # its error names the cause
    return "group.html", {**frame(address), "group": address.group}


def trace(address: Address) -> Page:
    """The trace of a group through the topics, a part of its page."""
    partition = partition_of(address.run, address.group)
    life = as_json.explain(address.runs.log, address.run, address.group, notify=lambda _: None, partition=partition)
    return "_trace.html", {"run": address.run, "group": address.group, "life": life, "text": as_page(life)}


def sql(address: Address, questions: threading.BoundedSemaphore, gone: Callable[[], bool]) -> Page:
    """An SQL query, if there is one, and its result."""
    sql_text, started = address.query.get("q", ""), time.monotonic()
    facts = {**frame(address), "q": sql_text, "questions": QUESTIONS, "views": _views(), "problem": None, "names": (), "rows": ()}
    facts["more"] = False
    if not sql_text.strip():
        prepare()
        return "sql.html", facts
    try:
        limits = Limits(rows=ROWS + 1, size=RESULT_BYTES, seconds=QUESTION_S, disconnected=gone)
        result = _result(address.runs, address.run, sql_text, questions, limits)
        rows = [list(row.values()) for row in result.slice(0, ROWS).to_pylist()]
        facts |= {"names": result.column_names, "rows": [list(map(_cell, row)) for row in rows], "more": result.num_rows > ROWS}
    except ValueError as error:
        facts["problem"] = str(error)
    return "sql.html", {**facts, "took": time.monotonic() - started}


def _cell(value: Any) -> tuple[str, str]:
    """A value as a cell shows it, and its kind: n for a number, "" for a text."""
    if isinstance(value, bool) or value is None:
        return "" if value is None else str(value).lower(), ""
    if isinstance(value, int | float):
        return f"{value:,}" if isinstance(value, int) else f"{value:.6g}", "n"
    if isinstance(value, list):
        return f"[{len(value):,} values]", ""
    return str(value), ""


def _result(runs: Runs, name: str, sql_text: str, questions: threading.BoundedSemaphore, limits: Limits) -> Any:
    """The result of a query. Raises `ValueError` if it is refused, exceeds a limit, or `questions` allows no further query now."""
    if not questions.acquire(blocking=False):
        raise ValueError("other queries are being computed: repeat this one when they have their results")
    try:
        return queries.ask(queries.LiveTables(cast(KafkaLog, runs.log), name), sql_text, limits)
    finally:
        prepare()  # starts the process of the next query, which loads its libraries meanwhile
        questions.release()


def logs(address: Address) -> Page:
    """The newest lines of the workers on this machine, in the order of their times."""
    worker, text = address.query.get("worker", ""), address.query.get("text", "").lower()
    facts = {**frame(address), "worker": worker, "text": address.query.get("text", ""), "lines": [], "workers": [], "problem": None}
    try:
        every = log_files(run_directory(address.run), None)
        files = log_files(run_directory(address.run), worker or None)
    except ConfigError as error:
        return "logs.html", {**facts, "problem": str(error)}
    lines = timed_lines({file: file.read_bytes() for file in files}, count=LOG_LINES)
    shown = [(file.stem, line) for file, line in lines if text in line.lower()]
    return "logs.html", {**facts, "lines": shown[-LOG_LINES:], "workers": [file.stem for file in every]}


def dead_letters(address: Address) -> Page:
    """The newest dead letters, with their reasons."""
    rows = []
    for record in browse.tail(address.runs.log, address.run, "dead-letters", count=DEAD_LETTERS, follow=False):
        try:
            rows.append(dead_letter(address.run, read(record, run=address.run)[1]))
        except Unusable as error:
            rows.append({"kind": "undecodable", "reason": str(error)})
    return "dead_letters.html", {**frame(address), "dead_letters": rows}


def topics(address: Address) -> Page:
    """The topics of a run: sizes, what was written a second since the page was last computed, and the roles that write and read."""
    log, watched, now = address.runs.log, address.watched, time.monotonic()
    rows = browse.list_topics(log, address.run, sizes=own_sizes(log), count_records=False)
    (since, before), watched.topics_before = watched.topics_before, (now, {row.topic: row for row in rows})
    listed = []
    for row in rows:
        earlier = before.get(row.topic)
        records, size = (None, None) if earlier is None else (row.offsets - earlier.offsets, (row.bytes or 0) - (earlier.bytes or 0))
        rates = [None if grown is None else grown / (now - since) for grown in (records, size)]
        listed.append((row, *rates, writers(row.topic), readers(row.topic)))
    return "topics.html", {**frame(address), "topics": listed}


def topic(address: Address) -> Page:
    """The newest records of a topic, or one record with its payload."""
    facts = {**frame(address), "topic": address.topic, "records": [], "record": None}
    if address.query.get("offset", "").isdecimal() and address.query.get("partition", "").isdecimal():
        position = {name: int(address.query[name]) for name in ("partition", "offset")}
        record = browse.view(browse.record_at(address.runs.log, address.run, address.topic, **position), run=address.run)
        payload = json.dumps(record["payload"], indent=2, ensure_ascii=False, default=str)
        return "topic.html", {**facts, "record": record, "payload": payload}
    newest = browse.tail(address.runs.log, address.run, address.topic, count=RECORDS, follow=False)
    return "topic.html", {**facts, "records": [(record, browse.as_line(record, run=address.run)) for record in newest][::-1]}


def config(address: Address) -> Page:
    return "config.html", {**frame(address), "config": config_rows(address.watched.update())}


def compare(address: Address) -> Page:
    """Curves of several runs, the differences between their configurations, and their completions of the same held-out prompts."""
    names = [resolve(address.runs.log, name) for name in dict.fromkeys(address.query.getlist("run"))]
    if not 1 < len(names) <= COMPARED:
        raise ConfigError(f"choose two to {COMPARED} runs to compare, not {len(names)}")
    views_ = {name: address.runs[name].update() for name in names}
    by = address.query.get("x", "step")
    configs = {name: {row["key"]: row for row in config_rows(view)} for name, view in views_.items()}
    keys = sorted({key for rows in configs.values() for key in rows})
    different = [key for key in keys if len({configs[name].get(key, {}).get("value") for name in names}) > 1]
    rows = [{"run": name, "steps": view.steps_done, **address.runs.summary(name)._asdict()} for name, view in views_.items()]
    return "compare.html", {
        "rows": rows,
        "x": by,
        "axes": tuple(AXES),
        "curves": {"main": list(_compared(views_, by)), "charts": [], "more": [], "still": []},
        "different": [(key, [configs[name].get(key, {}) for name in names]) for key in different],
        "examples": _examples(views_),
        "seeds": {*different} <= {"run.seed", "run.name", "rollout.seed"},  # then their spread is the noise
    }


AXES: Mapping[str, str] = {"step": "", "samples": "samples", "tokens": "tokens", "time": "time"}
MEASURES: Mapping[str, str] = {
    "reward_trained": "Reward, trained samples",
    "solved": "Evaluation, share solved greedily",
    "kl_behaviour_k3": "KL, behaviour to current",
    "entropy": "Entropy",
    "completion_tokens_mean": "Completion length",
    "grad_norm": "Gradient norm",
}


def _positions(view: RunView, by: str) -> dict[int, float]:
    """Return step -> position on the axis `by`: the step, the samples or tokens trained so far, or seconds since the first step started."""
    steps, total, positions = sorted(view.steps), 0.0, {}
    started = view.steps[steps[0]].metrics.get("started_at", view.steps[steps[0]].time_s) if steps else 0.0
    for step in steps:
        facts = view.steps[step]
        total += facts.metrics.get(by, 0.0)
        positions[step] = float(step) if by == "step" else facts.time_s - started if by == "time" else total
    return positions


def _compared(views_: Mapping[str, RunView], by: str) -> Iterator[dict[str, Any]]:
    """Yield a chart per measure with a curve per run, over the axis `by`. Raises `ConfigError` for an unknown axis."""
    if by not in AXES:
        raise ConfigError(f"x={by}: expected one of {', '.join(AXES)}")
    positions = {name: _positions(view, by) for name, view in views_.items()}
    for measure, title in MEASURES.items():
        series = [curve(name, _points(view, measure, positions[name])) for name, view in views_.items()]
        if any(each["y"] for each in series):
            yield {"title": title, "unit": "", "x": by, "series": series, "dots": measure == "solved"}


def _points(view: RunView, measure: str, positions: Mapping[int, float]) -> Iterator[tuple[float, float | None]]:
    """Yield (position on the axis, value) of a metric by step; of `solved` by evaluation, at the position of the last step before it."""
    if measure != "solved":
        yield from ((positions[step], view.steps[step].metrics.get(measure)) for step in sorted(view.steps))
        return
    for version, measured in sorted(view.evals.items()):
        before = [step for step in positions if view.steps[step].version < version]
        yield positions[max(before)] if before else 0.0, measured.values.get("greedy_accuracy")


def _examples(views_: Mapping[str, RunView]) -> list[tuple[str, list[Any]]]:
    """Return (prompt, example of each run) for the held-out prompts that the newest evaluations of all runs have in common."""
    newest = {name: completions(view.evals[max(view.evals)]) if view.evals else {} for name, view in views_.items()}
    first = next(iter(newest.values()))
    return [(prompt, [newest[name][prompt] for name in newest]) for prompt in first if all(prompt in own for own in newest.values())]


PAGES: Mapping[str, Callable[..., Page]] = {
    "samples": framed("samples.html"),
    "timeline": framed("timeline.html"),
    "config": config,
    "dead-letters": dead_letters,
    "topics": topics,
    "logs": logs,
    "card": card,
}
"""Name of a page below a run -> the function that makes it."""
