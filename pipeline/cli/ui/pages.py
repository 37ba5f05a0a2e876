"""The pages of `penstock ui`, each a function of the runs and of what its address asks for."""

import contextlib
import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from penstock.infra.errors import ConfigError
from penstock.infra.kafka.log import KafkaLog
from penstock.infra.log import Log, Tail
from penstock.infra.paths import run_directory
from penstock.pipeline.archive.database import Limits
from penstock.pipeline.archive.sql import LiveTables, question
from penstock.pipeline.cli.ui.markup import Curve, Html, address, chart, link, page, pairs, table, text
from penstock.pipeline.inspect.explain import as_json
from penstock.pipeline.inspect.explain.text import as_page
from penstock.pipeline.inspect.html.build import build
from penstock.pipeline.inspect.live.completions import without_template
from penstock.pipeline.inspect.live.frame import doing, ordered
from penstock.pipeline.inspect.records import browse
from penstock.pipeline.inspect.records.runs import list_runs, size
from penstock.pipeline.inspect.report.formats import duration
from penstock.pipeline.inspect.report.headline import headline
from penstock.pipeline.inspect.report.summary import summarise
from penstock.pipeline.inspect.run_status import config_of, group_statuses, has_ended, last_reward, status_of, steps_planned
from penstock.pipeline.inspect.run_view import RunView
from penstock.pipeline.inspect.status import WATCHED, elapsed_s
from penstock.pipeline.launch.run_lock import log_files
from penstock.pipeline.runtime.registration.run_registry import resolve
from penstock.pipeline.runtime.topic_reader import read_to_current_end
from penstock.topics import groups
from penstock.topics.catalogue import RUNS_TOPIC
from penstock.topics.wire.errors import Unusable

KEPT = 8
AT_ONCE = 2


@dataclass(slots=True)
class Watching:
    """Views of runs, brought up to date when they are asked for."""

    log: Log
    reading: threading.Lock = field(default_factory=threading.Lock)
    questions: threading.BoundedSemaphore = field(default_factory=lambda: threading.BoundedSemaphore(AT_ONCE))
    _views: "OrderedDict[str, tuple[RunView, Tail]]" = field(default_factory=OrderedDict)

    def view(self, run: str) -> RunView:
        """The run as it is at this moment. Raises `LogError`."""
        if run not in self._views:
            self._views[run] = RunView(run=run), self._tail(run)
            while len(self._views) > KEPT:
                self._views.popitem(last=False)[1][1].close()
        self._views.move_to_end(run)
        view, tail = self._views[run]
        for record in read_to_current_end(self.log, tail):
            with contextlib.suppress(Unusable):  # its owner sets it aside
                view.fold(record)
        return view

    def folder(self, run: str) -> Path:
        """The run's folder on this machine, which may not exist."""
        return run_directory(run)

    def close(self) -> None:
        """Stop reading."""
        for _, tail in self._views.values():
            tail.close()
        self._views.clear()

    def _tail(self, run: str) -> Tail:
        names = [RUNS_TOPIC, f"{run}.run", *(f"{run}.{topic}" for topic in WATCHED)]
        return self.log.tail({(name, number): "earliest" for name in names for number in range(self.log.partitions(name) or 0)})


NEWEST_RECORDS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Picked:
    """One sample with the reference answer of its prompt's row."""

    which: str
    group: int
    prompt: str
    answer: str | None
    completion: str
    reward: float


def newest_samples(log: Log, run: str) -> list[Picked]:
    """Best, median and worst sample by reward of the newest groups with rewards; [] if there are none."""
    scored = []
    for record in browse.tail(log, run, "groups", count=NEWEST_RECORDS, follow=False):
        try:
            group = groups.read(record, run=run)[1]
        except Unusable:
            continue  # the trainer sends it to the dead-letter topic
        scored += [(sample.reward, group, sample.completion) for sample in group.samples if sample.reward is not None]
    if not scored:
        return []
    ordered = sorted(scored, key=lambda candidate: -candidate[0])
    index_of = {"best": 0, "median": len(ordered) // 2, "worst": len(ordered) - 1}
    prompts = sorted({group.prompt for _, group, _ in scored})
    return [_picked(which, *ordered[index], prompts) for which, index in index_of.items()]


def _picked(which: str, reward: float, group: groups.Group, completion: str, prompts: list[str]) -> Picked:
    answer = json.loads(group.columns).get("answer")
    return Picked(
        which=which,
        group=group.group,
        prompt=without_template(group.prompt, prompts),
        answer=None if answer is None else str(answer),
        completion=completion,
        reward=reward,
    )


REFRESH_S = 5
ROWS = 200
QUESTION_S = 30.0
"""Longest time that the answer to a question in SQL is computed."""
ANSWER_BYTES = 16 << 20
LOG_LINES = 300
COMPARED = 4
QUESTIONS: Mapping[str, str] = {
    "worst completions": "select group_id, reward, answer, completion from samples where reward is not null order by reward limit 20",
    "why groups were dropped": "select fate, reason, count(*) as groups from groups where fate <> 'trained' group by all order by 3 desc",
    "cut-off completions": "select group_id, sample, tokens, completion from samples where finish = 'length' limit 20",
    "reward by prompt": "select prompt, avg(reward_mean) as reward, count(*) as groups from groups group by 1 order by 2 limit 30",
    "slowest groups": "select group_id, epoch_ms(scored) - epoch_ms(admitted) as ms, fate from groups order by 2 desc nulls last limit 20",
}

Query = Mapping[str, Sequence[str]]


def one(query: Query, name: str, default: str = "") -> str:
    """The first value that an address gives a name."""
    return (query.get(name) or [default])[0]


def index(runs: Watching, _query: Query) -> bytes:
    """All runs, newest first; up to four can be chosen to be compared."""
    rows = [
        (
            Html(f'<input type="checkbox" name="run" value="{text(row["run"])}" aria-label="compare {text(row["run"])}">'),
            link(row["run"], "run", id=row["run"]),
            row["status"],
            f"{row['steps_done']:,} of {row['steps'] or '?'}",
            "" if row["reward"] is None else f"{row['reward']:.3f}",
            chart([Curve("reward", curve_of(runs, row["run"]))], width=120, height=24, axes=False),
            size(row["bytes"]),
            row["model"],
            row["parent"] and link(row["parent"], "run", id=row["parent"]),
            row["age"],
        )
        for row in reversed(list_runs(runs.log))
    ]
    head = ("", "run", "status", "#steps", "#reward", "", "#size", "model", "parent", "age")
    listed = Html(f'<form action="compare">{table(head, rows)}<p><button>compare</button></p></form>')
    return page("runs", [Html("<h1>Runs</h1>"), listed if rows else Html("<p>no run is registered on this broker</p>")])


def curve_of(runs: Watching, run: str) -> Sequence[float | None]:
    """Mean reward by version, from version 0; None if no sample was generated first under a version."""
    rewards = runs.view(run).rewards
    return [rewards[version].mean if version in rewards else None for version in range(max(rewards, default=-1) + 1)]


def run(runs: Watching, query: Query) -> bytes:
    """A run at this moment; loads itself again while the run goes on."""
    name = resolve(runs.log, one(query, "id", "latest"))
    view, now_s = runs.view(name), time.time()
    report, elapsed, planned = summarise(view), elapsed_s(view, now_s=now_s), steps_planned(view)
    reward = last_reward(view)
    facts = {
        "status": status_of(view),
        "step": f"{view.steps_done:,} of {planned or '?'}",
        "reward, last tenth of the steps": "-" if reward is None else f"{reward:.3f}",
        "groups": ", ".join(f"{count:,} {status}" for status, count in report["groups"].items() if count),
        "time": "-" if elapsed is None else duration(elapsed),
        "dead letters": f"{len(view.dead_letters):,}",
    }
    body = [
        navigation(name),
        Html(f"<h1>{text(name)}</h1>"),
        *(Html(f"<p>{text(line)}</p>") for line in headline(report)),
        pairs(facts),
        Html("<h2>Reward</h2>"),
        chart([Curve("all scored samples, by version", curve_of(runs, name))]),
        Html("<h2>Newest samples</h2>"),
        *map(_card, newest_samples(runs.log, name)),
        Html("<h2>Workers</h2>"),
        table(("worker", "now"), _workers(view)),
        Html("<h2>Groups</h2>"),
        Html(
            "<p>"
            + " · ".join(
                link(f"{number} {status}", "group", id=name, group=number) for number, status in sorted(group_statuses(view).items())[-24:]
            )
            + "</p>"
        ),
    ]
    return page(name, body, refresh_s=None if has_ended(view) else REFRESH_S)


def _workers(view: RunView) -> list[tuple[str, str]]:
    """What each worker does, in the order of the pipeline; of a run that did not end well, who was killed."""
    over = {"stopped": "killed", "failed": "killed", "finished": "ended"}.get(status_of(view))
    return [(worker.worker, "ended" if worker.ended else over or doing(worker, now_s=time.time())) for worker in ordered(view)]


def _card(picked: Any) -> Html:
    answer = "" if picked.answer is None else f'<p><span class="dim">answer </span>{text(picked.answer)}</p>'
    head = f"{picked.which}: reward {picked.reward:g}, group {picked.group}"
    completion = f'<p><span class="dim">completion </span>{text(picked.completion)}</p>'
    return Html(f'<div class="card"><p class="dim">{head}</p><p>{text(picked.prompt)}</p>{answer}{completion}</div>')


def navigation(name: str) -> Html:
    """Links to the other pages of a run."""
    pages = (("run", "run"), ("page with timeline and tokens", "page"), ("SQL", "sql"), ("logs", "logs"), ("dead letters", "letters"))
    return Html(f"<nav>{link('runs', './')}" + "".join(link(title, path, id=name) for title, path in pages) + "</nav>")


def whole(runs: Watching, query: Query) -> bytes:
    """The page that `penstock report --html` writes."""
    return build(runs.log, resolve(runs.log, one(query, "id"))).html


def group(runs: Watching, query: Query) -> bytes:
    """The life of a group."""
    name, number = resolve(runs.log, one(query, "id")), one(query, "group")
    if not number.isdecimal():
        raise ConfigError(f"group {number!r} is no number")
    life = as_json.explain(runs.log, name, int(number), notify=lambda _: None)
    return page(
        f"group {number}", [navigation(name), Html(f"<h1>Group {number}</h1>"), Html(f'<pre class="wide">{text(as_page(life))}</pre>')]
    )


def sql(runs: Watching, query: Query, gone: Callable[[], bool]) -> bytes:
    """A question in SQL, and its answer; computed while other pages are made, until the browser has `gone`."""
    with runs.reading:
        name = resolve(runs.log, one(query, "id"))
    asked = one(query, "q") or QUESTIONS["worst completions"]
    saved = " · ".join(link(title, "sql", id=name, q=saved_question) for title, saved_question in QUESTIONS.items())
    area = f'<textarea name="q" aria-label="SQL">{text(asked)}</textarea>'
    form = Html(f'<form action="sql"><input type="hidden" name="id" value="{text(name)}">{area}<p><button>ask</button></p></form>')
    try:
        found = _answer(runs, name, asked, gone)
        rows = [tuple(str(value) if value is not None else "" for value in row.values()) for row in found.slice(0, ROWS).to_pylist()]
        more = f"the first {ROWS} rows" if found.num_rows > ROWS else f"{found.num_rows:,} rows"
        answer = Html(f'{table(found.column_names, rows)}<p class="dim">{more}</p>')
    except ValueError as error:
        answer = Html(f'<p class="bad">{text(error)}</p>')
    return page("SQL", [navigation(name), Html(f"<h1>{text(name)} in SQL</h1><p>{saved}</p>"), form, answer])


def _answer(runs: Watching, name: str, asked: str, gone: Callable[[], bool]) -> Any:
    """The first rows of an answer. Raises `ValueError` if the question is refused, at a limit, or has to wait for others."""
    if not runs.questions.acquire(blocking=False):
        raise ValueError("other questions are being computed: ask again when they have their answers")
    try:
        with runs.reading:
            prepared = question(LiveTables(cast(KafkaLog, runs.log), name), asked)
        return prepared.answer(Limits(rows=ROWS + 1, size=ANSWER_BYTES, seconds=QUESTION_S, disconnected=gone))
    finally:
        runs.questions.release()


def logs(runs: Watching, query: Query) -> bytes:
    """The last lines of each worker on this machine."""
    name = resolve(runs.log, one(query, "id"))
    try:
        files = log_files(runs.folder(name), one(query, "worker") or None)
    except ConfigError as error:
        return page("logs", [navigation(name), Html(f"<p>{text(error)}</p>")])
    parts = [
        Html(f"<h2>{text(file.stem)}</h2><pre>{text(chr(10).join(file.read_text('utf-8', 'replace').splitlines()[-LOG_LINES:]))}</pre>")
        for file in files
    ]
    again = None if has_ended(runs.view(name)) else REFRESH_S
    return page("logs", [navigation(name), Html(f"<h1>Logs of {text(name)}</h1>"), *parts], refresh_s=again)


def letters(runs: Watching, query: Query) -> bytes:
    """The newest dead letters, with the reasons."""
    name = resolve(runs.log, one(query, "id"))
    lines = [browse.as_line(record, run=name) for record in browse.tail(runs.log, name, "dead-letters", count=ROWS, follow=False)]
    said = Html(f"<pre>{text(chr(10).join(lines))}</pre>" if lines else "<p>none</p>")
    return page("dead letters", [navigation(name), Html(f"<h1>Dead letters of {text(name)}</h1>"), said])


def compare(runs: Watching, query: Query) -> bytes:
    """The rewards of up to four runs as curves, and what their configurations have different."""
    names = [resolve(runs.log, name) for name in list(dict.fromkeys(query.get("run", ())))]
    if not 1 < len(names) <= COMPARED:
        raise ConfigError(f"choose two to {COMPARED} runs to compare, not {len(names)}")
    flat = {name: _flat(config_of(runs.view(name))) for name in names}
    keys = sorted({key for table_ in flat.values() for key in table_})
    different = [key for key in keys if len({str(flat[name].get(key)) for name in names}) > 1]
    body = [
        Html(f"<nav>{link('runs', './')}</nav><h1>Compared</h1>"),
        chart([Curve(name, curve_of(runs, name)) for name in names], width=900, height=260),
        Html('<p class="dim">mean reward of all scored samples, by each run\'s own version</p>'),
        table(
            ("run", "#reward", "#steps", "status"),
            [
                (link(name, "run", id=name), _number(last_reward(runs.view(name))), len(runs.view(name).steps), status_of(runs.view(name)))
                for name in names
            ],
        ),
        Html("<h2>What is different</h2>"),
        table(("key", *names), [(key, *(flat[name].get(key, "") for name in names)) for key in different]),
    ]
    return page("compare", body)


def _flat(config: Mapping[str, Any]) -> dict[str, str]:
    return {f"{section}.{key}": str(value) for section, keys in config.items() if isinstance(keys, dict) for key, value in keys.items()}


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def problem(error: Exception) -> bytes:
    """An error in one line."""
    return page("problem", [Html(f"<nav>{link('runs', address('./'))}</nav>"), Html(f'<p class="bad">{text(error)}</p>')])


PAGES: Mapping[str, Callable[..., bytes]] = {
    "": index,
    "run": run,
    "page": whole,
    "group": group,
    "sql": sql,
    "logs": logs,
    "letters": letters,
    "compare": compare,
}
"""Path below the token -> the function that makes the page, of the runs and the query; `sql` takes the lock for reading itself."""
