"""`penstock ui` over HTTP: every page is there for who has the token, and for nobody else; a run's texts are never markup."""

import csv
import hashlib
import html
import http.client
import io
import json
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from starlette.datastructures import QueryParams

from penstock.infra.errors import PenstockError
from penstock.infra.memory.log import MemoryLog
from penstock.infra.paths import run_directory, state_directory
from penstock.pipeline.archive.sql import as_file, write_csv
from penstock.pipeline.cli import inspect
from penstock.pipeline.cli.ui import pages, store
from penstock.pipeline.cli.ui.server import AsciiJson, Server, stable_token
from penstock.pipeline.inspect.live.saved_view import ViewWriter
from penstock.pipeline.inspect.records.runs import LAST_ENTRIES, Note, list_runs, note_of
from penstock.pipeline.inspect.report.provenance import BISECTED, publish
from penstock.pipeline.inspect.report.summary import summarise
from penstock.pipeline.inspect.run_view import RunView
from penstock.pipeline.inspect.web.groups import newest_groups
from penstock.pipeline.inspect.web.run_facts import cards, config_rows, provenance, run_facts
from penstock.pipeline.launch.run_lock import UI_ADDRESS
from penstock.pipeline.runtime.topic_reader import between
from penstock.topics import ledger
from tests.support.a_run import RUN, RecordBuilder, folded, view_of
from tests.support.page_records import EVIL, OTHER, log_with, two_runs, write
from tests.support.paths import ROOT
from tests.support.waiting import until


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A server over a log in memory with two runs."""
    found = Server(two_runs(), port=0, token="secret")
    thread = threading.Thread(target=found.serve_forever)
    thread.start()
    yield found
    found.shutdown()
    thread.join()
    found.server_close()


def asked(
    server: Server, path: str, *, method: str = "GET", site: str = "none", form: str | None = None, accept: str = "text/html", **more: str
) -> tuple[int, str, dict[str, str]]:
    """Status, page and headers of one request."""
    where = urlsplit(server.address)
    connection = http.client.HTTPConnection(where.netloc, timeout=120)
    connection.request(method, path, form, headers={"Host": where.netloc, "Sec-Fetch-Site": site, "Accept": accept, **more})
    reply = connection.getresponse()
    return reply.status, reply.read().decode(), {name.lower(): value for name, value in reply.getheaders()}


def test_it_listens_on_loopback_and_answers_only_who_has_the_token_and_asks_this_host(server: Server) -> None:
    assert server.server_address[0] == "127.0.0.1"
    assert asked(server, "/secret/")[0] == 200
    for path in ("/", "/secre/", "/secret2/", "/secret/../", "/secret/etc/passwd", "/secret/runs"):
        assert asked(server, path)[0] == 404, path
    for host, status in (("evil.example", 404), ("localhost.evil.example:80", 404), ("localhost:9000", 200), ("127.0.0.1:1", 200)):
        assert asked(server, "/secret/", Host=host)[0] == status, "another port is one that ssh forwards"
    assert asked(server, "/secret/", method="POST")[0] == 501


def test_in_a_container_it_listens_on_every_address_and_serves_a_port_published_on_loopback() -> None:
    server = Server(MemoryLog(), host="0.0.0.0", port=0, token="secret")
    assert server.server_address[0] == "0.0.0.0"
    assert server.address == f"http://127.0.0.1:{server.server_address[1]}/secret/"
    server.server_close()


def test_a_port_that_is_taken_is_an_error_of_the_system_and_not_ours(server: Server) -> None:
    with pytest.raises(OSError, match="in use"):
        Server(MemoryLog(), port=server.server_address[1], token="other")


def test_a_page_allows_its_own_scripts_and_nothing_from_elsewhere(server: Server) -> None:
    _, page, headers = asked(server, f"/secret/r/{RUN}")
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy and "script-src 'self'" in policy and "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    scripts = re.findall(r'<script[^>]* src="([^"]*)"', page)
    assert scripts and all(re.fullmatch(r"/secret/static/\w+\.js\?[0-9a-f]{12}", script) for script in scripts)  # kept until it changes
    assert asked(server, scripts[0])[2]["cache-control"] == "private, max-age=31536000, immutable"
    assert re.findall(r"<script(?![^>]* src=)(?![^>]*application/json)", page) == []
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["cache-control"] == "no-store"


def test_vendored_files_are_those_of_their_packages() -> None:
    folder = ROOT / "pipeline/inspect/web/static"
    pins = dict(reversed(line.split()) for line in (folder / "vendored.sha256").read_text().splitlines() if not line.startswith("#"))
    assert set(pins) == {"htmx.js", "uplot.css", "uplot.js"}
    assert {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in pins} == pins


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("", RUN),
        (f"r/{RUN}", "Newest samples"),
        (f"r/{RUN}/samples", "Filter groups"),
        (f"r/{RUN}/g/0", "Trace"),
        (f"r/{RUN}/g/0/trace", "filtered"),
        (f"r/{RUN}/timeline", "Timeline"),
        (f"r/{RUN}/dead-letters", "groups/0/0"),
        (f"r/{RUN}/config", "schedule.max_lag"),
        (f"r/{RUN}/sql", "worst completions"),
        (f"r/{RUN}/topics", "rollouts"),
        (f"r/{RUN}/topics/groups", "0@0"),
        (f"r/{RUN}/topics/groups?partition=0&offset=0", "reward_names"),
        (f"compare?run={RUN}&run={OTHER}", "run.seed"),
        ("static/app.js", "DOMContentLoaded"),
    ],
)
def test_every_page_of_a_run_is_there(server: Server, path: str, said: str) -> None:
    status, page, _ = asked(server, f"/secret/{path}")
    assert status == 200, page
    assert said in page


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("r/nosuch", "no run"),
        (f"r/{RUN}/g/99999", "was never admitted"),
        (f"compare?run={RUN}", "choose two to 8 runs"),
        (f"compare?run={RUN}&run={OTHER}&x=y", "expected one of step"),
        (f"r/{RUN}/logs", "has no log"),
        (f"r/{RUN}/groups?reward=x", "expected a number"),
        (f"r/{RUN}/topics/nosuch", "there is no topic"),
        (f"r/{RUN}/download.xls", "expected one of csv, jsonl, parquet"),
        (f"r/{RUN}/download.csv%0d%0aX-Own:%20x?q=select%201", "expected one of csv, jsonl, parquet"),
        (f"r/{RUN}/download.csv?q=drop%20table%20samples", "must be one read-only statement"),
    ],
)
def test_a_mistake_is_a_line_on_a_page_or_in_json(server: Server, path: str, said: str) -> None:
    for accept in ("text/html", "*/*"):
        status, page, headers = asked(server, f"/secret/{path}", accept=accept)
        assert status in (200, 400)
        assert said in page
        assert status == 200 or ("html" in headers["content-type"]) == (accept == "text/html")


def test_a_run_shows_its_provenance_or_the_commands_that_find_it_out(server: Server) -> None:
    def shown() -> str:
        return re.sub("<[^>]*>", " ", html.unescape(asked(server, f"/secret/r/{RUN}")[1].partition('aria-label="Provenance"')[2]))

    view, folder = server.runs[RUN].update(), run_directory(RUN)
    assert f"{view.head} ({view.last_seq + 1:,} entries)" in shown()
    for command in (f"penstock card {RUN}", f"penstock bisect {RUN} --test", f"penstock regrade {RUN} --reward"):
        assert command in shown()
    assert "no card on this machine" in asked(server, f"/secret/r/{RUN}/card")[1]
    try:
        (folder / "bisect").mkdir(parents=True)
        (folder / BISECTED).write_text("step 3 is the first <b>bad</b> one")
        (folder / "card").mkdir()
        facts = {"run": RUN, "weights": None, "topics": {}, "ledger": {"head": view.head, "entries": view.last_seq + 1}}
        publish(folder / "card", "# A card <b>of</b> the run", facts, notify=print)
        assert f"penstock verify {folder}/card --log {RUN}" in shown() and "of this state" in shown()
        page = asked(server, f"/secret/r/{RUN}")[1]
        assert f'href="/secret/r/{RUN}/card"' in page and "&lt;b&gt;bad&lt;/b&gt;" in page
        assert "# A card &lt;b&gt;of" in asked(server, f"/secret/r/{RUN}/card")[1]
    finally:
        shutil.rmtree(folder)


def test_a_run_names_the_run_that_it_was_made_from_the_nearest_first() -> None:
    built = RecordBuilder()
    built.info |= {"forked_from": {"run": "a", "step": 1}, "regraded_from": {"run": "b", "step": 4}, "rescored_from": None}
    (parent,) = [row for row in provenance(view_of(built.whole())) if row["name"] == "regraded from"]
    assert (parent["text"], parent["page"]) == ("b, step 4", "b")


def test_latest_leads_to_the_newest_run(server: Server) -> None:
    status, _, headers = asked(server, "/secret/r/latest/samples?status=stale")
    assert (status, headers["location"]) == (307, f"/secret/r/{OTHER}/samples?status=stale")


def listed(server: Server, query: str = "") -> dict[str, Any]:
    status, page, _ = asked(server, f"/secret/r/{RUN}/groups?{query}")
    assert status == 200, page
    found: dict[str, Any] = json.loads(page)
    return found


def test_the_list_of_groups_is_filtered_sorted_and_read_in_pages(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = listed(server)
    assert (whole["total"], whole["matched"], whole["next"]) == (10, 10, None)
    assert [row["group"] for row in whole["rows"]] == list(range(9, -1, -1))
    assert whole["rows"][0] | {"rewards": None} == {
        "group": 9, "status": "unused", "step": None, "reward": 1.0, "version": 3, "rewards": None, "prompt": "3 4",
    }  # fmt: skip
    assert [row["group"] for row in listed(server, "status=filtered")["rows"]] == [0]
    assert [row["group"] for row in listed(server, "step=1..2&sort=oldest")["rows"]] == [3, 4, 5, 6]
    best = [row["reward"] for row in listed(server, "sort=best")["rows"]]
    assert best == sorted(best, reverse=True)
    assert all(0.3 <= row["reward"] <= 0.7 for row in listed(server, "reward=0.3..0.7")["rows"])
    assert len(listed(server, "text=5")["rows"]) == 10 and listed(server, "text=nowhere")["rows"] == []
    assert listed(server, "finish=length")["rows"] == []
    monkeypatch.setattr(store, "PAGE", 4)
    pages, after = list[list[int]](), ""
    while after is not None:
        page = listed(server, f"after={after}")
        pages.append([row["group"] for row in page["rows"]])
        after = page["next"]
    assert pages == [[9, 8, 7, 6], [5, 4, 3, 2], [1, 0]]


def test_all_groups_of_one_prompt_are_listed_by_the_row_of_the_data(server: Server) -> None:
    row = json.loads(asked(server, f"/secret/r/{RUN}/g/8/data")[1])["row"]
    assert [found["group"] for found in listed(server, f"row={row}&sort=oldest")["rows"]] == [8]


def test_histograms_count_mean_rewards_and_lengths_of_the_groups_of_a_filter(server: Server) -> None:
    whole, some = (json.loads(asked(server, f"/secret/r/{RUN}/groups/histograms?{query}")[1]) for query in ("", "step=1..2"))
    assert sum(whole["reward"]["counts"]) == 10 and sum(some["reward"]["counts"]) == 4
    assert (whole["reward"]["edges"][0], whole["reward"]["edges"][-1]) == (0.0, 1.0)
    assert whole["length"]["edges"][0] <= 3 <= whole["length"]["edges"][-1] and sum(whole["length"]["counts"]) == 10


@pytest.mark.costly
def test_the_samples_of_a_filter_are_files_in_three_formats(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    _, text, headers = asked(server, f"/secret/r/{RUN}/download.jsonl?status=trained&step=1..2&finish=stop")
    lines = [json.loads(line) for line in text.splitlines()]
    assert (len(lines), {line["step"] for line in lines}) == (16, {1, 2})
    assert headers["content-disposition"] == f'attachment; filename="{RUN}-samples.jsonl"'
    rows = list(csv.DictReader(asked(server, f"/secret/r/{RUN}/download.csv?step=1..2&text=5")[1].splitlines()))
    assert rows[0]["completion"] == "5" and json.loads(rows[0]["token_ids"])
    assert asked(server, f"/secret/r/{RUN}/download.jsonl?finish=length")[1] == ""
    monkeypatch.setattr(pages, "DOWNLOADED", 12)
    status, page, _ = asked(server, f"/secret/r/{RUN}/download.jsonl")
    assert status == 400 and "more than 12 rows: narrow the filter" in page


def test_no_cell_of_a_csv_file_is_a_formula_of_a_spreadsheet_and_any_text_is_read_back_from_it() -> None:
    csv.field_size_limit(1 << 21)
    texts = ["=1+1", "+1", "-1", "@SUM(1)", "\t=1", "\r=1", "plain", "a\nb", "\x1b[2J", "x" * 1_000_000, "\u202e=1", None]
    table = pa.table({"=own": texts, "number": [-1.5] * len(texts), "list": [[-1]] * len(texts)})
    rows = list(csv.reader(io.StringIO(as_file(table, "csv").decode(), newline="")))
    assert rows[0] == ["'=own", "number", "list"]
    assert [row[0] for row in rows[1:]] == [*(f"'{text}" for text in texts[:6]), *texts[6:11], ""]
    assert rows[1][1:] == ["-1.5", "[-1]"]
    lines = as_file(table, "jsonl").decode().splitlines()
    assert [json.loads(line)["=own"] for line in lines] == texts
    assert pq.read_table(io.BytesIO(as_file(table, "parquet"))).equals(table)
    write_csv(table, lines := io.StringIO(newline=""))
    assert [row[0] for row in csv.reader(io.StringIO(lines.getvalue(), newline=""))] == ["=own", *texts[:11], ""]
    assert not lines.getvalue().endswith("\r\n") and '"\r=1"' in lines.getvalue()  # a bare CR would end the row


def test_notes_of_runs_change_only_with_write_and_from_a_page_of_the_server(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    path, form = f"/secret/r/{RUN}/note", "name=%3Cb%3Ebold&text=hello&tags=good+good+old"
    assert asked(server, path, method="POST", site="same-origin", form=form)[0] == 501
    monkeypatch.setattr(server, "writable", True)
    for site in ("none", "same-site", "cross-site"):
        assert asked(server, path, method="POST", site=site, form=form)[0] == 501
    assert asked(server, f"/secret/r/{RUN}/config", method="POST", site="same-origin", form=form)[0] == 405
    status, _, headers = asked(server, path, method="POST", site="same-origin", form=form)
    assert (status, headers["location"]) == (303, f"/secret/r/{RUN}")
    assert note_of(RUN) == Note(name="<b>bold", text="hello", tags=("good", "old"))
    page = asked(server, f"/secret/r/{RUN}")[1]
    assert "<b>&lt;b&gt;bold</b>" in page and 'value="good old"' in page
    assert asked(server, "/secret/r/..%2fout/note", method="POST", site="same-origin", form=form)[0] in (400, 404)
    assert asked(server, path, method="POST", site="same-origin", form="text=" + "x" * 70_000)[0] == 413
    asked(server, path, method="POST", site="same-origin", form="")
    assert note_of(RUN) == Note()


def test_topics_have_writers_and_readers_and_during_a_run_what_is_written_a_second() -> None:
    records = list(RecordBuilder(steps=4).whole())
    log = log_with(records[:20])
    address = pages.Address(store.Runs(log), QueryParams(), run=RUN)

    def rows() -> dict[str, tuple[Any, ...]]:
        return {row.topic: (row.offsets, rate, by, readers) for row, rate, _, by, readers in pages.topics(address)[1]["topics"]}

    before = rows()
    assert before["rollouts"][1] is None
    assert (before["rollouts"][2], "scorer" in before["rollouts"][3]) == (["environment", "rollout"], True)
    write(log, records[20:40])
    after = rows()
    grown = {topic for topic in after if after[topic][0] > before[topic][0]}
    assert grown and {topic for topic in after if after[topic][1]} == grown


def test_a_group_has_its_texts_tokens_and_versions(server: Server) -> None:
    found = json.loads(asked(server, f"/secret/r/{RUN}/g/8/data")[1])
    assert (found["prompt"], found["status"], found["step"]) == ("3 4", "trained", 3)
    assert [sample["sample"] for sample in found["samples"]] == [0, 1, 2, 3]
    detail = found["samples"][0]["detail"]
    assert len(detail["ids"]) == len(detail["logprobs"]) == found["samples"][0]["tokens"] == 3
    assert detail["spans"] == [[0, 3]]


def test_numbers_that_json_does_not_have_are_null() -> None:
    found = AsciiJson({"reward": [float("nan"), float("-inf"), 0.5], "text": "\ud800"}).body
    assert found == b'{"reward":[null,null,0.5],"text":"\\ud800"}'


def test_texts_of_an_address_are_never_markup(server: Server) -> None:
    page = asked(server, f"/secret/r/{quote(EVIL, safe='')}")[1]
    assert "<img" not in page
    assert "&lt;img" in page or "Not Found" in page


def test_runs_that_differ_in_their_seeds_alone_are_compared_by_effective_values(server: Server) -> None:
    page = asked(server, f"/secret/compare?run={RUN}&run={OTHER}")[1]
    keys = re.findall(r"<tr><td><code>([a-z_.]+)</code>", page)
    assert keys == ["run.seed"], "a correction that follows from the schedule is the same in both"


def test_the_list_of_runs_opens_none_and_only_those_opened_last_are_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "OPEN_RUNS", 1)
    log, following = two_runs(), list[Any]()
    tail, kind = log.tail, type(log.tail({}))
    close = kind.close
    monkeypatch.setattr(log, "tail", lambda starts: following.append(tail(starts)) or following[-1])
    monkeypatch.setattr(kind, "close", lambda one: (following.remove(one), close(one)))
    runs = store.Runs(log)
    listed = {run: runs.summary(run) for run in (RUN, OTHER)}
    assert following == []
    first = runs[RUN]
    steps = first.update().steps_done
    runs[OTHER].update()
    assert (len(following), first.update().steps_done, runs[RUN] is first) == (1, steps, False)
    assert {run: runs.summary(run) for run in (RUN, OTHER)} == listed
    runs.close()
    assert following == []


@pytest.mark.parametrize(
    "query",
    ["select sum(a.range * b.range) from range(10000000) a, range(10000000) b", "select list_sum(range(100000000)) from range(100)"],
)
def test_while_a_question_is_computed_other_pages_answer_and_it_ends_with_its_browser(server: Server, query: str) -> None:
    where, free = urlsplit(server.address), server.questions._value
    with closing(http.client.HTTPConnection(where.netloc, timeout=120)) as asking:
        asking.request("GET", f"/secret/r/{RUN}/sql?q={quote(query)}", headers={"Host": where.netloc})
        until(lambda: server.questions._value == free - 1)
        assert asked(server, "/secret/")[0] == 200
    until(lambda: server.questions._value == free)


def test_an_answer_in_sql_has_its_first_rows_and_more_questions_than_two_are_refused(server: Server) -> None:
    assert "the first 500 rows" in asked(server, f"/secret/r/{RUN}/sql?q={quote('from range(1000)')}")[1]
    with server.questions, server.questions:
        assert "other queries are being computed" in asked(server, f"/secret/r/{RUN}/sql?q=select")[1]


def test_a_key_with_the_value_of_its_default_is_not_marked_as_set() -> None:
    config = {"run": {"name": "demo", "steps": 4}, "data": {"source": "rows.jsonl", "rewards": {}, "skip_rows": []}}
    view = view_of([RecordBuilder(steps=1, config=config).record("running")])
    assert [row["key"] for row in config_rows(view) if row["set"] and row["key"].startswith("data.")] == ["data.source"]


@pytest.mark.parametrize(("status", "said"), [("finished", "ended"), ("stopped", "killed"), ("failed", "killed")])
def test_a_run_that_ended_well_shows_no_killed_worker(status: str, said: str) -> None:
    builder = RecordBuilder(steps=1)
    view = view_of([builder.record(status), builder.measured_by("scorer-0"), builder.measured_by("feeder", "final")])
    view.record = replace(view.record, updated_ns=2**62)  # type: ignore[type-var]
    facts = run_facts(view, summarise(view), now_s=1.0)
    assert {worker["name"]: worker["now"] for worker in facts["workers"]} == {"feeder": "ended", "scorer-0": said}


def test_the_token_stays_the_same_over_restarts_and_belongs_to_its_user(tmp_path: Path) -> None:
    path = tmp_path / "ui.token"
    first = stable_token(path)
    assert stable_token(path) == first and len(first) >= 22
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_run_with_many_groups_is_opened_from_what_its_tracker_has_saved_and_shows_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    log = log_with(RecordBuilder(steps=100).whole())
    read = store.WatchedRun(log, RUN)
    saved, positions = RunView(run=RUN), dict[tuple[str, int], int]()
    for topic, share in (("ledger", 0.8), ("metrics", 0.8), ("groups", 0.9), ("prompts", 0.9), ("dead-letters", 1.0)):
        tp = f"{RUN}.{topic}", 0
        positions[tp] = int(share * log.end_offsets([tp])[tp])
        for record in between(log, tp, 0, positions[tp]):
            saved.fold(record)
    saved.forget()
    assert saved.past.steps > 40
    ViewWriter(log, log.producer(), "tracker").write(saved, positions, now=True)
    monkeypatch.setattr(store, "MANY", 150)
    opened = store.WatchedRun(log, RUN)
    fresh, page = read.page(), opened.page()
    assert opened.view.past.steps == 0 and opened.view.steps_done == 100
    for part in ("main", "charts", "more"):
        charts, same = ([chart for chart in of["curves"][part] if chart["title"] != "Statuses of groups"] for of in (page, fresh))
        assert charts == same
    assert all(page[name] == fresh[name] for name in ("status", "step", "cards", "groups", "attention"))
    for number in (0, 3, 150, 201):  # filtered, before and after the saved view, unused
        assert json.dumps(opened.detail(number)) == json.dumps(read.detail(number)) != "{}"
    assert opened.detail(900) == {}
    for each in (read, opened):
        each.close()


def test_the_list_of_runs_reads_the_end_of_a_ledger_and_of_an_ended_run_the_saved_view(monkeypatch: pytest.MonkeyPatch) -> None:
    log = log_with([*RecordBuilder(steps=100).whole()])
    tp = f"{RUN}.ledger", 0
    end = log.end_offsets([tp])[tp]
    ViewWriter(log, log.producer(), "tracker").write(folded(between(log, tp, 0, end)), {tp: end}, now=True)
    read: list[str] = []
    decode = ledger.read
    monkeypatch.setattr(ledger, "read", lambda record, *, run: (read.append(record.topic), decode(record, run=run))[1])
    rows = list_runs(log)
    assert [(row["run"], row["steps_done"], row["reason"]) for row in rows] == [(RUN, 100, "")]
    assert 0 < len(read) <= LAST_ENTRIES
    read.clear()
    summary = store.Runs(log).summary(RUN)
    assert (summary.status, read) == ("finished", [])


def test_the_newest_samples_of_a_page_and_of_the_file_are_the_same_though_rewards_are_equal() -> None:
    builder = RecordBuilder(steps=1)
    groups = [group for number in range(3) for group in builder.group([0.5] * 4, version=0)]
    log = log_with([builder.record("running"), builder.opened(), builder.version(0), *groups])
    run = store.WatchedRun(log, RUN)
    read = list(run.read(newest_groups(run.update())).values())
    assert run.page()["cards"] == cards(read) == cards(read[::-1]) and [card["group"] for card in cards(read)] == [0, 1, 2]
    run.close()


def test_a_second_server_on_the_same_port_says_where_the_first_one_is(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspect, "at", lambda *_: nullcontext(MemoryLog()))
    port = server.server_address[1]
    with pytest.raises(PenstockError, match=rf"listen on 127.0.0.1:{port}: Address already in use; choose another --port"):
        inspect.ui(port=port)
    address = state_directory() / UI_ADDRESS
    address.write_text(server.address, encoding="utf-8")
    with pytest.raises(PenstockError, match=rf"listen on 127.0.0.1:{port}: `penstock ui` runs at {server.address}; choose another --port"):
        inspect.ui(port=port)
    monkeypatch.setattr("penstock.pipeline.cli.ui.server.Server.serve_forever", lambda _: None)
    inspect.ui(port=0)
    assert address.read_text() == server.address, "a second one on another port leaves the address of the first"
    address.unlink()
