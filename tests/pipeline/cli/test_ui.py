"""`penstock ui`: every page is there for who has the token, and for nobody else; a run's texts are never markup."""

import http.client
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any
from urllib.parse import quote, urlsplit

import pytest

from penstock.pipeline.cli.ui import pages
from penstock.pipeline.cli.ui.markup import Curve, chart
from penstock.pipeline.cli.ui.server import Server
from penstock.pipeline.inspect.run_view import RunView
from tests.support.a_run import RUN, RecordBuilder, as_records
from tests.support.page_records import EVIL, log_with

CHROMIUM = next((found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None)
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A server over a log in memory with one run."""
    found = Server(log_with(list(RecordBuilder(steps=4).whole())), port=0, token="secret")
    thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield found
    found.shutdown()
    thread.join()
    found.server_close()


def asked(server: Server, path: str, *, host: str | None = None, method: str = "GET") -> tuple[int, str, dict[str, str]]:
    """Status, page and headers of one request."""
    where = urlsplit(server.address)
    connection = http.client.HTTPConnection(where.netloc, timeout=120)
    connection.request(method, path, headers={"Host": host or where.netloc})
    reply = connection.getresponse()
    return reply.status, reply.read().decode(), dict(reply.getheaders())


def test_it_listens_on_loopback_and_answers_only_who_has_the_token_and_asks_this_host(server: Server) -> None:
    assert server.server_address[0] == "127.0.0.1"
    assert asked(server, "/secret/")[0] == 200
    for path in ("/", "/secre/", "/secret2/", "/secret/../", "/secret/etc/passwd", "/secret/runs"):
        assert asked(server, path)[0] == 404, path
    assert asked(server, "/secret/", host="evil.example")[0] == 404
    assert asked(server, "/secret/", method="POST")[0] == 501


def test_a_port_that_is_taken_is_an_error_of_the_system_and_not_ours(server: Server) -> None:
    with pytest.raises(OSError, match="in use"):
        Server(log_with([]), port=server.server_address[1], token="other")


def test_a_page_allows_no_script_and_nothing_from_elsewhere(server: Server) -> None:
    _, page, headers = asked(server, f"/secret/run?id={RUN}")
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "script-src" not in policy
    assert "<script" not in page
    assert headers["Referrer-Policy"] == "no-referrer"
    assert headers["Cache-Control"] == "no-store"


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("", RUN),
        (f"run?id={RUN}", "Newest samples"),
        (f"group?id={RUN}&group=0", "group 0 of run"),
        (f"letters?id={RUN}", "Dead letters"),
        (f"page?id={RUN}", "Penstock"),
    ],
)
def test_every_page_of_a_run_is_there(server: Server, path: str, said: str) -> None:
    status, page, _ = asked(server, f"/secret/{path}")
    assert status == 200, page
    assert said in page


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("run?id=nosuch", "no run"),
        (f"group?id={RUN}&group=x", "is no number"),
        (f"group?id={RUN}&group=99999", "was never admitted"),
        (f"compare?run={RUN}", "choose two to 4 runs"),
        (f"logs?id={RUN}", "has no log"),
    ],
)
def test_a_mistake_is_a_line_on_a_page(server: Server, path: str, said: str) -> None:
    status, page, _ = asked(server, f"/secret/{path}")
    assert status in (200, 400)
    assert said in page


def test_texts_of_an_address_are_never_markup(server: Server) -> None:
    page = asked(server, f"/secret/run?id={quote(EVIL)}")[1]
    assert "<script" not in page
    assert "<img" not in page


def test_of_two_curves_the_shorter_ends_where_its_versions_do() -> None:
    long, short = re.findall(r'points="([^"]*)"', chart([Curve("long", [0.0] * 11), Curve("short", [0.0, None, 1.0])], width=108))
    assert [point.split(",")[0] for point in long.split()] == [f"{4 + 10 * place:.1f}" for place in range(11)]
    assert [point.split(",")[0] for point in short.split()] == ["4.0", "24.0"]


def until(true: Callable[[], bool]) -> None:
    """Wait for what another thread does."""
    limit = time.monotonic() + 120
    while not true():
        assert time.monotonic() < limit
        time.sleep(0.02)


@pytest.mark.parametrize(
    "query",
    ["select sum(a.range * b.range) from range(10000000) a, range(10000000) b", "select list_sum(range(100000000)) from range(100)"],
)
def test_while_a_question_is_computed_other_pages_answer_and_it_ends_with_its_browser(server: Server, query: str) -> None:
    where, free = urlsplit(server.address), server.runs.questions._value
    with closing(http.client.HTTPConnection(where.netloc, timeout=120)) as asking:
        asking.request("GET", f"/secret/sql?id={RUN}&q={quote(query)}", headers={"Host": where.netloc})
        until(lambda: server.runs.questions._value == free - 1)
        assert asked(server, "/secret/")[0] == 200
    until(lambda: server.runs.questions._value == free)


def test_an_answer_in_sql_has_its_first_rows_and_more_questions_than_two_are_refused(server: Server) -> None:
    assert "the first 200 rows" in asked(server, f"/secret/sql?id={RUN}&q={quote('from range(1000)')}")[1]
    with server.runs.questions, server.runs.questions:
        assert "other questions are being computed" in asked(server, f"/secret/sql?id={RUN}&q=select")[1]


@pytest.mark.parametrize("error", [BrokenPipeError, ConnectionResetError, ValueError])
def test_a_browser_that_closes_the_connection_leaves_no_traceback(
    server: Server, error: type[Exception], capfd: pytest.CaptureFixture[str]
) -> None:
    try:
        raise error("sent nothing")
    except error:
        server.handle_error(None, ("127.0.0.1", 1))
    assert ("Traceback" in capfd.readouterr().err) == (error is ValueError)


@pytest.mark.costly
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install --no-install-recommends chromium")
@pytest.mark.parametrize(("width", "scheme"), [(420, "light"), pytest.param(1280, "dark", marks=pytest.mark.slow)])
def test_in_a_browser_the_list_leads_to_a_run_without_complaint_or_sideways_scrolling(server: Server, width: int, scheme: Any) -> None:
    from playwright.sync_api import sync_playwright

    complaints: list[str] = []
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        page.on("console", lambda said: complaints.append(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(server.address)
        page.get_by_role("link", name=RUN, exact=True).click()
        assert page.get_by_role("heading", name=RUN).is_visible()
        assert page.locator(".card").count() == 3
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        back = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert back == ("rgb(255, 255, 255)" if scheme == "light" else "rgb(13, 17, 23)")
        page.get_by_role("link", name="page with timeline and tokens").click()
        page.wait_for_selector("html[data-ready]", state="attached", timeout=120_000)
        browser.close()
    assert [said for said in complaints if "favicon" not in said] == []


@pytest.mark.parametrize(("status", "said"), [("finished", "ended"), ("stopped", "killed"), ("failed", "killed")])
def test_a_run_that_ended_well_shows_no_killed_worker(status: str, said: str) -> None:
    builder, view = RecordBuilder(steps=1), RunView(run=RUN)
    records = [builder.record(status), builder.measured_by("scorer-0"), builder.measured_by("feeder", "final")]
    for record in as_records(records):
        view.fold(record)
    view.record = replace(view.record, updated_ns=2**62)  # type: ignore[type-var]
    assert dict(pages._workers(view)) == {"feeder": "ended", "scorer-0": said}
