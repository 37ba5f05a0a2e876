"""The one-file page of a finished run in a real browser: it opens from disk without a network or an error, and every view answers."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.infra.kafka.log import KafkaLog
from penstock.infra.paths import run_directory
from penstock.pipeline.cli.app import main
from penstock.pipeline.inspect.report.headline import headline
from penstock.pipeline.inspect.web.build import build
from tests.support.a_run import RUN, RecordBuilder
from tests.support.browser import WAIT_MS, Watched, browser, in_a_browser
from tests.support.full_read import FullRead
from tests.support.page_records import EVIL, log_with, rewritten
from tests.support.paths import ROOT
from tests.support.recorded_run import RecordedRun

pytestmark = in_a_browser


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as started:
        yield started


def watched(chromium: Any, path: Path, **options: Any) -> Watched:
    page = chromium.new_page(viewport={"width": 1440, "height": 900}, reduced_motion="reduce", **options)
    return Watched(page, path.as_uri())


@pytest.fixture(scope="module")
def path(recorded: RecordedRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recorded run's page as the command writes it."""
    found = tmp_path_factory.mktemp("page") / "run.html"
    assert main(["report", recorded.run, "--html", str(found), "--bootstrap", recorded.bootstrap]) == 0
    return found


@pytest.fixture
def looked(chromium: Any, path: Path) -> Iterator[Watched]:
    """The page of the recorded run; it must not have complained when its test is over."""
    found = watched(chromium, path)
    yield found
    found.page.close()
    assert found.complaints == []


def shown(page: Any, count: int) -> None:
    """Wait until the list says that so many groups pass the filters."""
    page.wait_for_function("count => document.getElementById('matching').dataset.shown === String(count)", arg=count, timeout=WAIT_MS)


def group_is(page: Any, box: str, number: int) -> None:
    page.wait_for_function(
        "([box, title]) => document.querySelector(`#${box} h2`)?.textContent === title", arg=[box, f"Group {number}"], timeout=WAIT_MS
    )


def test_a_recorded_run_opens_from_disk_and_says_what_the_report_says(looked: Watched, path: Path, recorded: RecordedRun) -> None:
    report, page = recorded.report, looked.open()
    assert path.stat().st_size < 1_000_000
    assert page.text_content("header h1") == recorded.run
    assert page.text_content("header .status") == "finished"
    assert page.locator(".verdict p:not(.progress)").all_text_contents()[: len(headline(report))] == headline(report)
    assert json.loads(page.text_content("pre[aria-label='All figures']"))["groups"] == report["groups"]
    for fate in (fate for fate, count in report["groups"].items() if count and fate != "admitted"):
        assert re.search(rf"{fate}\s*{report['groups'][fate]}\D", page.inner_text(".columns table >> nth=0").replace("\t", " ")), fate
    titles = " ".join(page.locator(".chart h3, #still").all_text_contents())
    for title in ("Reward", "Evaluation", "Completion length", "Lag", "Effective sample size", "KL", "Loss", "Gradient norm"):
        assert title in titles, title
    for view, content in (("dead-letters", "reward-failed"), ("config", "schedule.mode"), ("samples", "groups"), ("timeline", "Timeline")):
        page.click(f"[data-tab={view}]")
        page.wait_for_selector(f"[data-view={view}]:visible", timeout=WAIT_MS)
        shown_there = "([view, content]) => document.querySelector(`[data-view=${view}]`).innerText.includes(content)"
        page.wait_for_function(shown_there, arg=[view, content], timeout=WAIT_MS)
    assert looked.serious() == []


def test_it_opens_with_three_samples_of_the_newest_step(looked: Watched, log: KafkaLog, recorded: RecordedRun) -> None:
    page = looked.open()
    table, steps = (getattr(FullRead(log, recorded.run), name)().to_pylist() for name in ("samples", "steps"))
    rewards = sorted((row["reward"] for row in table if row["group"] in steps[-1]["groups"]), reverse=True)
    cards = page.locator("#live .card h3")
    assert cards.locator("a").all_text_contents() == ["best by reward", "median", "worst"]
    found = [float(text) for text in cards.locator("b").all_text_contents()]
    assert found == pytest.approx([rewards[0], rewards[len(rewards) // 2], rewards[-1]], abs=1e-2)
    cards.locator("a").first.click()
    page.wait_for_selector("#group .card.marked", timeout=WAIT_MS)


def test_the_tracker_leaves_the_page_beside_the_report_and_with_mlflow(recorded: RecordedRun, chromium: Any) -> None:
    import mlflow

    looked = watched(chromium, run_directory(recorded.run) / "report.html")
    assert looked.open().text_content("header h1") == recorded.run
    assert looked.complaints == []
    looked.page.close()
    files = mlflow.MlflowClient(tracking_uri=recorded.mlflow_uri).list_artifacts(recorded.report["mlflow_run_id"])
    assert "report.html" in {file.path for file in files}


@pytest.mark.slow
def test_the_timeline_has_a_lane_for_every_worker_and_answers_to_keys_wheel_and_drag(looked: Watched) -> None:
    page = looked.open("#/timeline")
    page.wait_for_selector("#lanes[data-from]", timeout=WAIT_MS)
    lanes = page.locator("#lanes")
    assert {"feeder", "rollout-0", "rollout-1", "scorer-0", "trainer"} <= set(lanes.get_attribute("data-lanes").split())

    def span() -> float:
        page.evaluate("paintNow()")
        return float(lanes.get_attribute("data-to")) - float(lanes.get_attribute("data-from"))

    lanes.focus()
    page.keyboard.press("0")
    whole = span()
    page.keyboard.press("+")
    assert span() == pytest.approx(whole / 2, rel=1e-6)
    before = float(lanes.get_attribute("data-from"))
    page.keyboard.press("ArrowLeft")
    assert span() == pytest.approx(whole / 2, rel=1e-6) and float(lanes.get_attribute("data-from")) < before
    page.keyboard.press("0")
    assert span() == whole
    box = lanes.bounding_box()
    page.mouse.move(box["x"] + 600, box["y"] + 60)
    page.mouse.wheel(0, -200)
    page.wait_for_function("whole => paintNow() || lanes.dataset.to - lanes.dataset.from < whole", arg=whole)
    page.click("#timeline [data-do=all]")
    page.mouse.move(box["x"] + 500, box["y"] + 5)
    page.mouse.down()
    page.mouse.move(box["x"] + 700, box["y"] + 5, steps=4)
    page.mouse.up()
    assert span() == pytest.approx(whole * 200 / (box["width"] - 2 - 112 - 8), rel=0.05)


@pytest.mark.slow
def test_an_interval_tells_what_it_is_and_a_click_opens_its_group(looked: Watched) -> None:
    page = looked.open("#/timeline")
    page.wait_for_selector("#lanes[data-from]", timeout=WAIT_MS)
    where = page.evaluate(
        """() => {
          const ofTrained = (one) => one.sample >= 0 && data.statuses[data.g_status[one.group]] === "trained";
          const lane = timeline.lanes.find((one) => one.items.some(ofTrained));
          const item = lane.items.find(ofTrained);
          zoomToGroup(item.group);
          paintNow();
          const box = document.getElementById("lanes").getBoundingClientRect();
          const x = box.left + toX((item.start + item.end) / 2, box.width), y = box.top + lane.top + (item.row + 0.5) * lane.rowHeight;
          return [x, y, data.g_number[item.group], data.s_number[item.sample], lane.name];
        }"""
    )
    page.mouse.move(where[0], where[1])
    tip = page.inner_text("#tip")
    assert tip.startswith(f"{where[4]}: rollout") and f"group {where[2]}, sample {where[3]}: trained" in tip and "reward" in tip
    page.mouse.click(where[0], where[1])
    group_is(page, "group", where[2])
    assert page.locator(".card.marked h3").text_content().startswith(f"#{where[3]}")
    page.go_back()
    page.focus("#lanes")
    page.keyboard.press("n")
    assert page.is_visible("#tip")


@pytest.mark.slow
def test_the_list_filters_by_status_reward_version_step_worker_and_text(looked: Watched, log: KafkaLog, recorded: RecordedRun) -> None:
    page, counts = looked.open("#/samples"), recorded.report["groups"]
    table = FullRead(log, recorded.run).samples().to_pylist()
    shown(page, counts["admitted"])
    for fate in ("filtered", "failed", "trained"):
        page.select_option("[name=status]", fate)
        shown(page, counts[fate])
    page.fill("[name=step]", "2..3")
    shown(page, 8)
    page.click("#filters button[type=reset]")
    page.fill("[name=reward]", "0.001..")
    shown(page, page.evaluate("Array.from(data.g_reward).filter((reward) => reward >= 0.001).length"))
    page.click("#filters button[type=reset]")
    for worker in sorted({row["worker"] for row in table}):
        page.fill("[name=worker]", worker)
        shown(page, len({row["group"] for row in table if row["worker"] == worker}))
    page.click("#filters button[type=reset]")
    wanted = next(row for row in table if row["reward"] is not None and len(row["completion"]) >= 6)["completion"][1:6]
    groups = {row["group"] for row in table if row["completion"] and wanted.lower() in row["completion"].lower()}
    page.fill("[name=text]", wanted)
    page.select_option("[name=sort]", "oldest")
    shown(page, len(groups))
    group_is(page, "pane", min(groups))
    assert page.locator("#pane .hit, #pane mark").count() > 0


@pytest.mark.slow
def test_a_group_shows_its_samples_and_tokens_which_tell_more(looked: Watched, log: KafkaLog, recorded: RecordedRun) -> None:
    page = looked.open("#/samples")
    page.wait_for_selector("#list [aria-selected=true]", timeout=WAIT_MS)
    number = page.evaluate("data.g_number[Array.from(data.g_status).indexOf(0)]")
    page.evaluate("number => { location.hash = `#/g/${number}`; }", number)
    group_is(page, "group", number)
    for fold in page.locator("#group .card h3 button").all():
        fold.click()
    rows = {row["sample"]: row for row in FullRead(log, recorded.run).samples().to_pylist() if row["group"] == number}
    cards = page.locator("#group .card")
    assert cards.count() == len(rows) == 4
    for card in cards.all():
        row = rows[int(card.get_attribute("aria-label").removeprefix("Sample "))]
        assert re.sub("<(eos|pad|bos|unk)>", "", card.locator(".tokens").text_content()) == row["completion"]
        assert card.locator(".tokens span").count() == len(row["token_ids"])
        card.locator("summary").click()
        facts = card.locator("dl").inner_text()
        assert "digits" in facts and "brevity × 0.5" in facts and row["worker"] in facts

    def looks() -> list[str]:
        return page.evaluate("[...document.querySelectorAll('#group .tokens span')].map((one) => one.className + one.style.cssText)")

    by = {}
    for name in ("logprob", "advantage", "version", "none"):
        page.click(f"#group .colour [data-by={name}]")
        by[name] = looks()
    assert len(set(by["logprob"])) > 4 and 1 < len(set(by["advantage"])) <= 4
    assert by["version"] != by["logprob"] and set(by["none"]) == {""}
    first = rows[int(cards.first.get_attribute("aria-label").removeprefix("Sample "))]
    page.hover("#group .tokens span >> nth=0")
    tip = page.inner_text("#tip")
    assert f"token 0: id {first['token_ids'][0]}" in tip and f"policy version {first['policy_version_min']}" in tip
    assert float(re.search(r"logprob (-?[\d.]+) nat", tip)[1]) == pytest.approx(first["behaviour_logprobs"][0], abs=6e-4)


def test_text_that_looks_like_markup_is_shown_as_text(chromium: Any, tmp_path: Path) -> None:
    records = []
    for record in RecordBuilder(steps=1).whole():
        evil = lambda samples: tuple(replace(sample, completion=EVIL) for sample in samples)  # noqa: E731
        records += rewritten(record, prompt=EVIL, reason=EVIL, samples=evil) if record.topic.endswith(".groups") else [record]
    path = tmp_path / "evil.html"
    path.write_bytes(build(log_with(records), RUN).html)
    looked = watched(chromium, path)
    page = looked.open("#/g/0")
    page.wait_for_selector("#group .card", timeout=WAIT_MS)
    visible = EVIL.replace("\u2028", "\\u2028")
    assert page.text_content("#group .prompt") == page.text_content("#group .note >> nth=0") == visible
    assert visible in page.locator("#group .card").first.text_content()
    page.click("[data-tab='']")
    assert visible in page.locator("#live .card").first.text_content()
    assert page.locator("img").count() == 0
    page.click("[data-tab=samples]")
    page.fill("[name=text]", "onerror=alert")
    shown(page, 4)
    assert looked.complaints == []
    page.close()


@pytest.mark.slow
def test_a_run_that_has_only_begun_is_shown_as_far_as_it_is(chromium: Any, tmp_path: Path) -> None:
    builder = RecordBuilder(steps=3)
    begun = [*builder.start(), builder.version(0)]
    drawn = [record for record in builder.group([0.0] * 4, version=0) if not record.topic.endswith(".groups")]
    for name, records in {"first.html": begun[:1], "open.html": [*begun, *drawn]}.items():
        (tmp_path / name).write_bytes(build(log_with(records), RUN).html)
    looked = watched(chromium, tmp_path / "open.html")
    page = looked.open("#/g/0")
    page.wait_for_selector("#group .card", timeout=WAIT_MS)
    assert page.text_content("header .status") == "running"
    assert "not scored" in page.locator("#group .card h3").first.text_content()
    assert looked.complaints == []
    page.close()
    looked = watched(chromium, tmp_path / "first.html")
    shown(looked.open("#/samples"), 0)
    assert looked.complaints == []
    looked.page.close()


@pytest.mark.slow
def test_twenty_thousand_samples_stay_below_25_mb_and_are_ready_in_two_seconds() -> None:
    command = [sys.executable, "-m", "benchmarks", "page", "file", "--samples", "20000", "--opens", "3", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["samples"] == 20_000 and found["left_out"] == []
    assert found["page_mb"] < 25
    assert found["ready_ms_median"] < 2000


def test_a_path_that_cannot_be_written_is_a_line_and_status_2(
    recorded: RecordedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", recorded.run, "--html", str(tmp_path / "no" / "x.html"), "--bootstrap", recorded.bootstrap]) == 2
    assert "its directory does not exist" in capsys.readouterr().err
    assert main(["report", recorded.run, "--tokens", "5", "--bootstrap", recorded.bootstrap]) == 2
    assert "--tokens needs --html PATH" in capsys.readouterr().err
