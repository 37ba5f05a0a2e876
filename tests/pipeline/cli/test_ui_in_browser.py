"""`penstock ui` in a real browser: every page, live updates in place, the keyboard alone, narrow screens, and hostile completions."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.infra.memory.log import MemoryLog
from penstock.pipeline.cli.ui.server import Server
from penstock.topics.wire.record import Outgoing
from tests.support.a_run import RUN, RecordBuilder
from tests.support.browser import WAIT_MS, Watched, browser, in_a_browser
from tests.support.page_records import EVIL, OTHER, log_with, rewritten, two_runs, write

pytestmark = in_a_browser
PAGES = {
    "runs": "",
    "compare": f"compare?run={RUN}&run={OTHER}",
    "run": f"r/{RUN}",
    "samples": f"r/{RUN}/samples",
    "group": f"r/{RUN}/g/8",
    "timeline": f"r/{RUN}/timeline",
    "config": f"r/{RUN}/config",
    "dead-letters": f"r/{RUN}/dead-letters",
    "sql": f"r/{RUN}/sql?q=select+1+as+one",
    "topics": f"r/{RUN}/topics",
    "topic": f"r/{RUN}/topics/groups",
    "record": f"r/{RUN}/topics/groups?partition=0&offset=0",
    "logs": f"r/{RUN}/logs",
}
OPENED_MOST = ("run", "samples", "group")
LONG = 1_000_000
HOSTILE = {
    "markup": EVIL,
    "terminal": "\x1b[2J\x07\x00bell",
    "directions": "\u202egnorw\u202c \u2067abc\u2069",
    "right to left": "\u05e9\u05dc\u05d5\u05dd 5",
    "long": "x" * LONG,
    "template": "{{ 7 * 7 }}{% raw %}<b>",
}


class Serving:
    """A server over a log that a test can append to."""

    def __init__(self, log: MemoryLog, *, port: int = 0) -> None:
        self.log, self.server = log, Server(log, port=port, token="secret")
        self._thread = threading.Thread(target=self.server.serve_forever)
        self._thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self._thread.join()
        self.server.server_close()


def half_written() -> tuple[Serving, list[Outgoing]]:
    """A server of a run of six steps that has come to the middle, and the rest of its records."""
    records = list(RecordBuilder(steps=6).whole())
    half = next(at for at, record in enumerate(records) if record.topic.endswith(".ledger") and at > len(records) // 2)
    return Serving(log_with(records[:half])), records[half:]


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as started:
        yield started


@pytest.fixture(scope="module")
def two() -> Iterator[Serving]:
    serving = Serving(two_runs())
    yield serving
    serving.close()


def watched(chromium: Any, serving: Serving, *, width: int = 1280, scheme: str = "light") -> Watched:
    page = chromium.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme, reduced_motion="reduce")
    return Watched(page, serving.server.address)


@pytest.mark.parametrize(("width", "scheme"), [(420, "dark"), (1280, "light")])
@pytest.mark.parametrize("name", [name if name in OPENED_MOST else pytest.param(name, marks=pytest.mark.slow) for name in PAGES])
def test_a_page_is_quiet_readable_and_as_wide_as_the_screen(chromium: Any, two: Serving, name: str, width: int, scheme: str) -> None:
    looked = watched(chromium, two, width=width, scheme=scheme)
    page = looked.open(PAGES[name])
    if name == "group":
        page.wait_for_selector("#trace .life", timeout=WAIT_MS)
    if name in ("samples", "group"):
        page.wait_for_selector(".tokens, .text", timeout=WAIT_MS)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert looked.serious() == []
    assert looked.complaints == []
    page.close()


def test_a_run_that_goes_on_is_patched_in_place(chromium: Any) -> None:
    serving, rest = half_written()
    looked = watched(chromium, serving)
    try:
        page = looked.open(f"r/{RUN}")
        done = int(page.text_content(".progress b"))
        page.evaluate("""() => {
          document.querySelector("details summary").focus();
          document.querySelector("#more-charts").open = true;
          window.scrollTo(0, 300);
          window.kept = [document.querySelector(".card pre"), document.querySelector(".uplot"), document.querySelector(".verdict p")];
          getSelection().selectAllChildren(window.kept[2]);
        }""")
        where = "[Math.round(document.activeElement.getBoundingClientRect().top / 4), document.activeElement.textContent]"
        before = page.evaluate(where)
        write(serving.log, rest)
        page.wait_for_function("done => Number(document.querySelector('.progress b').textContent) > done", arg=done, timeout=WAIT_MS)
        page.wait_for_selector("#live[data-live=false]", timeout=WAIT_MS)
        assert int(page.text_content(".progress b")) == 6
        assert page.evaluate(where) == before, "what has the focus has not moved on the screen"
        assert page.evaluate("kept.every((node) => node.isConnected) && document.querySelector('#more-charts').open")
        assert page.evaluate("plots.get('main-charts Reward').data[0].length") == 6, "the curves have grown"
        assert page.text_content(".status") == "finished"
        assert looked.complaints == []
    finally:
        looked.page.close()
        serving.close()


def test_a_page_of_a_server_that_comes_back_is_updated_again(chromium: Any) -> None:
    records = list(RecordBuilder(steps=6).whole())
    serving = Serving(log_with(records[:30]))
    looked = watched(chromium, serving)
    page = looked.open(f"r/{RUN}")
    page.wait_for_function("() => document.documentElement.dataset.updates", timeout=WAIT_MS)
    port = serving.server.server_address[1]
    serving.close()
    page.wait_for_selector("#live-problem:visible", timeout=WAIT_MS)
    again = Serving(log_with(records), port=port)
    try:
        page.wait_for_selector("#live[data-live=false]", timeout=WAIT_MS)
        assert page.text_content(".status") == "finished"
        assert page.is_hidden("#live-problem")
    finally:
        page.close()
        again.close()


def test_a_filter_leads_to_a_sample_and_to_a_token_by_the_keyboard_alone(chromium: Any, two: Serving) -> None:
    looked = watched(chromium, two)
    page = looked.open(f"r/{RUN}/samples")
    page.wait_for_selector("#list [aria-selected=true]", timeout=WAIT_MS)
    page.keyboard.press("f")
    page.keyboard.type("trained")
    page.wait_for_function("() => document.getElementById('matching').textContent.startsWith('8 of 10')", timeout=WAIT_MS)
    assert page.url.endswith("samples?status=trained"), "the view is an address"
    page.keyboard.press("Escape")
    page.keyboard.press("j")
    page.wait_for_function("() => document.querySelector('#pane h2')?.textContent === 'Group 7'", timeout=WAIT_MS)
    page.keyboard.press("c")
    assert page.get_attribute(".colour [data-by=advantage]", "aria-pressed") == "true"
    page.keyboard.press("Enter")
    page.wait_for_selector("#group .tokens", timeout=WAIT_MS)
    assert page.url.endswith(f"r/{RUN}/g/7")
    page.focus("#group .tokens")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert page.inner_text("#tip").startswith("token 1: id 1")
    page.keyboard.press("Tab")
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("ArrowLeft")
    page.wait_for_url("**/g/6", timeout=WAIT_MS)
    assert looked.complaints == []
    page.close()


def test_a_histogram_filters_its_samples_are_a_file_and_a_note_is_written(
    chromium: Any, two: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(two.server, "writable", True)
    looked = watched(chromium, two)
    page = looked.open(f"r/{RUN}/samples")
    page.wait_for_selector("#spread path", timeout=WAIT_MS)
    assert page.locator("#spread [role=img]").count() == 2
    page.locator("#spread svg").first.click(position={"x": 2, "y": 10})
    page.wait_for_function("() => document.getElementById('matching').textContent.startsWith('3 of 10')", timeout=WAIT_MS)
    with page.expect_download(timeout=WAIT_MS) as started:
        page.get_by_role("link", name="JSONL").click()
    assert len(Path(started.value.path()).read_text().splitlines()) == 12
    page = looked.open(f"r/{RUN}")
    page.get_by_text("name, note and tags").click()
    page.fill("input[name=name]", "first try")
    page.get_by_role("button", name="save").click()
    page.wait_for_selector(".about-run b:text-is('first try')", timeout=WAIT_MS)
    assert looked.complaints == []
    page.close()


def test_the_timeline_of_a_run_grows_and_a_moved_view_stays(chromium: Any) -> None:
    serving, rest = half_written()
    looked = watched(chromium, serving)
    try:
        page = looked.open(f"r/{RUN}/timeline")
        page.wait_for_selector("#lanes[data-lanes]", timeout=WAIT_MS)
        before = page.evaluate("zoom(0.5), [timeline.from, timeline.to, data.g_number.length]")
        write(serving.log, rest)
        page.wait_for_function("groups => data.g_number.length > groups", arg=before[2], timeout=WAIT_MS)
        assert page.evaluate("[timeline.from, timeline.to]") == before[:2]
        page.wait_for_function("() => !data.live", timeout=WAIT_MS)
        assert looked.complaints == []
    finally:
        looked.page.close()
        serving.close()


def test_chosen_runs_are_compared(chromium: Any, two: Serving) -> None:
    looked = watched(chromium, two)
    page = looked.open()
    for run in (RUN, OTHER):
        page.get_by_role("checkbox", name=f"compare {run}").check()
    page.get_by_role("button", name="compare").click()
    page.wait_for_selector("html[data-ready]", state="attached", timeout=WAIT_MS)
    assert page.locator(".chart").count() >= 2
    assert page.locator(".config td code").first.text_content() == "run.seed"
    page.select_option("select[name=x]", "tokens")
    page.get_by_role("button", name="show").click()
    page.wait_for_url("**x=tokens", timeout=WAIT_MS)
    page.check("#spread")
    assert page.locator(".u-series th").all_text_contents()[1:4] == ["mean", "least", "greatest"]
    assert looked.complaints == []
    page.close()


def test_a_question_is_stopped_and_its_process_ends(chromium: Any, two: Serving) -> None:
    looked = watched(chromium, two)
    page = looked.open(f"r/{RUN}/sql")
    free = two.server.questions._value
    page.fill("textarea", "select sum(a.range * b.range) from range(10000000) a, range(10000000) b")
    page.keyboard.press("Control+Enter")
    page.wait_for_selector("#stop:enabled", timeout=WAIT_MS)
    page.click("#stop")
    page.wait_for_selector("#stop:disabled", timeout=WAIT_MS)
    deadline = threading.Event()
    for _ in range(600):
        if two.server.questions._value == free:
            break
        deadline.wait(0.1)
    assert two.server.questions._value == free
    page.fill("textarea", "select 'a' as letter, [1, 2] as list, 17 as group_id")
    page.keyboard.press("Control+Enter")
    page.wait_for_selector("#result td", timeout=WAIT_MS)
    assert page.locator("#result td").all_inner_texts() == ["a", "[2 values]", "17"]
    assert page.locator("#result td a").get_attribute("href").endswith(f"/r/{RUN}/g/17")
    assert looked.complaints == []
    page.close()


def test_hostile_completions_are_text_with_visible_escapes(chromium: Any) -> None:
    texts = list(HOSTILE.values())
    records = []
    for record in RecordBuilder(steps=2).whole():
        own = iter(texts * 4)
        evil = lambda samples, own=own: tuple(replace(sample, completion=next(own)) for sample in samples)  # noqa: E731
        hostile = record.topic.endswith(".groups")
        records += rewritten(record, prompt=EVIL, samples=evil, columns='{"answer": "<script>alert(1)</script>"}') if hostile else [record]
        texts = texts[2:] + texts[:2]
    serving = Serving(log_with(records))
    looked = watched(chromium, serving)
    try:
        shown = ""
        for path in (f"r/{RUN}", *(f"r/{RUN}/g/{group}" for group in range(4)), f"r/{RUN}/samples"):
            page = looked.open(path)
            page.wait_for_selector(".card .text, .tokens", timeout=WAIT_MS)
            assert page.evaluate("document.querySelectorAll('main img, main b > b').length") == 0
            assert page.evaluate("document.documentElement.scrollWidth") <= 1280
            shown += page.inner_text("main")
        assert EVIL.split("\u2028")[0].strip() in shown and "\\u2028" in shown
        assert not set(shown) & set("\x1b\x07\x00\u202e\u2067")
        assert "{{ 7 * 7 }}" in shown and "\u05e9\u05dc\u05d5\u05dd" in shown
        assert looked.complaints == []
    finally:
        looked.page.close()
        serving.close()
