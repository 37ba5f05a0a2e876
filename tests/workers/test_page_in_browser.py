"""The page of a finished run in a real browser: it loads without network or errors, and timeline and sample browser answer."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from penstock.infra.kafka.log import KafkaLog
from penstock.infra.paths import run_directory
from penstock.pipeline.cli.app import main
from penstock.pipeline.inspect.html.build import build, write
from penstock.pipeline.inspect.report.headline import headline
from penstock.pipeline.inspect.tables.run_tables import RunTables
from tests.support.a_run import RUN, RecordBuilder
from tests.support.page_records import EVIL, log_with, rewritten
from tests.support.paths import ROOT
from tests.support.recorded_run import RecordedRun

CHROMIUM = next((found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None)
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
FLAGS += ["--disable-component-update", "--disable-sync"]
pytestmark = [
    pytest.mark.costly,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install --no-install-recommends chromium"),
]


@dataclass(slots=True)
class Watched:
    """A page, and what it complained about or asked the network for."""

    page: Any
    complaints: list[str] = field(default_factory=list)

    def open(self, path: Path) -> Any:
        page = self.page
        page.on("console", lambda said: self.complaints.append(f"console: {said.text}") if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: self.complaints.append(f"error: {error}"))
        page.on("dialog", lambda dialog: (self.complaints.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.on("request", lambda asked: None if asked.url.startswith(path.as_uri()) else self.complaints.append(f"request: {asked.url}"))
        page.goto(path.as_uri(), wait_until="commit")
        page.wait_for_selector("html[data-ready], html[data-failed]", state="attached", timeout=120_000)
        return page


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield started
        started.close()


@pytest.fixture
def watched(browser: Any) -> Iterator[Watched]:
    """A new page; it must not have complained when its test is over."""
    page = browser.new_page(viewport={"width": 1440, "height": 900}, reduced_motion="reduce")
    found = Watched(page)
    yield found
    page.close()
    assert found.complaints == []


@pytest.fixture(scope="module")
def path(recorded: RecordedRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recorded run's page as the command writes it."""
    found = tmp_path_factory.mktemp("page") / "run.html"
    assert main(["report", recorded.run, "--html", str(found), "--bootstrap", recorded.bootstrap]) == 0
    return found


@pytest.fixture
def page(watched: Watched, path: Path) -> Any:
    return watched.open(path)


def shown(page: Any) -> int:
    """How many groups the list has, once a filter has answered."""
    return int(page.get_attribute("#found", "data-shown"))


def wait_for_shown(page: Any, count: int) -> None:
    page.wait_for_function("count => document.getElementById('found').dataset.shown === String(count)", arg=count, timeout=120_000)


def test_a_recorded_run_loads_and_its_head_says_what_the_report_says(page: Any, recorded: RecordedRun) -> None:
    report = recorded.report
    assert page.text_content("#run") == recorded.run
    assert page.text_content("#status") == "finished"
    assert page.locator("#verdict p").all_text_contents() == headline(report)
    figures = page.text_content("#figures")
    assert f"{report['reward']['first']:.3f} → {report['reward']['last']:.3f}" in figures
    assert f"{report['samples']} samples" in figures
    assert json.loads(page.text_content("#everything pre"))["groups"] == report["groups"]
    for fate in (fate for fate, count in report["groups"].items() if count and fate != "admitted"):
        assert re.search(rf"{fate}\s*{report['groups'][fate]}\D", page.inner_text("#statuses").replace("\t", " ")), fate
    assert "reward-failed" in page.text_content("#letters")
    titles = page.locator("#charts h3").all_text_contents()
    titles += [text for line in page.locator("#still").all_text_contents() for text in line.partition(": ")[2].split(" · ")]
    for title in ("Reward", "Fates of the groups", "Completion length", "Lag", "Effective sample size", "KL", "Loss", "Gradient norm"):
        assert any(text.startswith(title) for text in titles), title


def test_a_page_opens_with_three_samples_of_the_newest_step_and_the_newest_trained_group(
    page: Any, log: KafkaLog, recorded: RecordedRun
) -> None:
    table = RunTables(log, recorded.run).samples().to_pylist()
    steps = RunTables(log, recorded.run).steps().to_pylist()
    rewards = sorted(row["reward"] for row in table if row["group"] in steps[-1]["groups"])
    cards = page.locator("#picked .card")
    assert [text.split()[0].removesuffix("reward") for text in cards.locator("h4").all_text_contents()] == ["best", "median", "worst"]
    shown_rewards = [float(re.search(r"reward (-?[\d.]+)", text.replace("−", "-"))[1]) for text in cards.locator("h4").all_text_contents()]
    assert shown_rewards == pytest.approx([rewards[-1], rewards[len(rewards) - 1 - len(rewards) // 2], rewards[0]], abs=1e-2)
    assert all(cards.locator(".answer").nth(place).is_visible() for place in range(3))
    page.wait_for_selector("#group .card")
    assert int(page.text_content("#group h3").removeprefix("Group ")) == max(steps[-1]["groups"])
    assert page.url.endswith(".html"), "nobody has chosen that group"
    lanes = page.locator("#lanes")
    from_, to = (float(lanes.get_attribute(f"data-{end}")) for end in ("from", "to"))
    first, last = page.evaluate("[Math.min(...data.s_start), timeline.most]")
    assert 0 < from_ < first and to <= last, "the timeline begins with the first sample, not with loading"


def test_equal_completions_are_one_card_and_groups_are_sorted_by_reward(watched: Watched, tmp_path: Path) -> None:
    write(build(log_with(list(RecordBuilder(steps=3).whole())), RUN), tmp_path / "run.html")
    page = watched.open(tmp_path / "run.html")
    page.wait_for_selector("#group .card")
    cards = page.locator("#group .card")
    assert cards.count() == 1
    assert page.text_content("#group .card h4 button") == "× 4"
    page.click("#group .card h4 button")
    assert cards.count() == 4

    def groups() -> list[str]:
        return [text.split("\n")[0] for text in page.locator("#rows .row").all_inner_texts()]

    assert groups() == [str(number) for number in range(7, -1, -1)]
    page.select_option("#f-order", "best")
    page.wait_for_function("() => list.shown[0] === 7 && list.shown[5] < 3")
    assert groups()[:5] == ["7", "6", "5", "4", "3"]
    page.select_option("#f-order", "worst")
    page.wait_for_function("() => list.shown[7] === 5")
    assert groups()[-5:] == ["4", "3", "7", "6", "5"]


def test_the_tracker_leaves_the_page_beside_the_report_and_with_mlflow(recorded: RecordedRun, watched: Watched) -> None:
    import mlflow

    beside = run_directory(recorded.run) / "report.html"
    page = watched.open(beside)
    assert page.text_content("#run") == recorded.run
    run_id = recorded.report["mlflow_run_id"]
    files = mlflow.MlflowClient(tracking_uri=recorded.mlflow_uri).list_artifacts(run_id)
    assert "report.html" in {file.path for file in files}


@pytest.mark.slow
def test_the_timeline_has_a_lane_for_every_worker_and_answers_to_keys_wheel_and_drag(page: Any) -> None:
    lanes = page.locator("#lanes")
    assert {"feeder", "rollout-0", "rollout-1", "scorer-0", "trainer"} <= set(lanes.get_attribute("data-lanes").split())

    def span() -> float:
        page.evaluate("draw()")
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
    page.wait_for_function("whole => draw() || lanes.dataset.to - lanes.dataset.from < whole", arg=whole)
    page.click("#timeline [data-do=all]")
    page.mouse.move(box["x"] + 500, box["y"] + 5)
    page.mouse.down()
    page.mouse.move(box["x"] + 700, box["y"] + 5, steps=4)
    page.mouse.up()
    assert span() == pytest.approx(whole * 200 / (box["width"] - 2 - 112 - 8), rel=0.05)


@pytest.mark.slow
def test_an_interval_tells_what_it_is_and_a_click_opens_its_group(page: Any) -> None:
    where = page.evaluate(
        """() => {
          const ofTrained = (one) => one.sample >= 0 && data.statuses[data.g_status[one.group]] === "trained";
          const lane = timeline.lanes.find((one) => one.items.some(ofTrained));
          const item = lane.items.find(ofTrained);
          showGroup(item.group);
          draw();
          const box = document.getElementById("lanes").getBoundingClientRect();
          const x = box.left + toX((item.start + item.end) / 2, box.width), y = box.top + lane.top + (item.row + 0.5) * lane.rowHeight;
          return [x, y, data.g_number[item.group], data.s_number[item.sample], lane.name];
        }"""
    )
    page.mouse.move(where[0], where[1])
    tip = page.inner_text("#tip")
    assert tip.startswith(f"{where[4]}: rollout") and f"group {where[2]}, sample {where[3]}: trained" in tip and "reward" in tip
    page.mouse.click(where[0], where[1])
    page.wait_for_selector("#group h3")
    assert page.text_content("#group h3") == f"Group {where[2]}"
    assert page.locator(".card.marked h4").text_content().startswith(f"sample {where[3]}")
    page.focus("#lanes")
    page.keyboard.press("n")
    assert page.is_visible("#tip")


@pytest.mark.slow
def test_the_list_filters_by_fate_reward_version_step_and_worker(page: Any, log: KafkaLog, recorded: RecordedRun) -> None:
    counts = recorded.report["groups"]
    assert shown(page) == counts["admitted"]
    for fate in ("filtered", "failed", "trained"):
        page.select_option("#f-status", label=fate)
        wait_for_shown(page, counts[fate])
    page.fill("#f-step-min", "2")
    page.fill("#f-step-max", "3")
    wait_for_shown(page, 8)
    page.click("#filters button[type=reset]")
    wait_for_shown(page, counts["admitted"])
    page.fill("#f-reward-min", "0.001")
    page.wait_for_function("all => Number(document.getElementById('found').dataset.shown) < all", arg=counts["admitted"])
    expected = page.evaluate("Array.from(data.g_reward).filter((reward) => reward >= 0.001).length")
    wait_for_shown(page, expected)
    page.click("#filters button[type=reset]")
    page.fill("#f-version-max", "0")
    of_version_0 = "Array.from(data.g_size, (_, g) => data.s_min.subarray(data.first[g], data.first[g + 1]).includes(0))"
    expected = page.evaluate(f"{of_version_0}.filter((one) => one).length")
    wait_for_shown(page, expected)
    page.click("#filters button[type=reset]")
    any_worker, *drawers = page.locator("#f-worker option").all_text_contents()
    assert any_worker == "any" and drawers and set(drawers) <= {"rollout-0", "rollout-1"}
    for worker in drawers:
        drawn = {row["group"] for row in RunTables(log, recorded.run).samples().to_pylist() if row["worker"] == worker}
        page.select_option("#f-worker", label=worker)
        wait_for_shown(page, len(drawn))


@pytest.mark.slow
def test_search_finds_completions_and_a_chosen_group_shows_its_samples_side_by_side(
    page: Any, log: KafkaLog, recorded: RecordedRun
) -> None:
    table = RunTables(log, recorded.run).samples().to_pylist()
    trained = next(row for row in table if row["reward"] is not None and len(row["completion"]) >= 6)
    wanted = trained["completion"][1:6]
    groups = {row["group"] for row in table if row["completion"] and wanted.lower() in row["completion"].lower()}
    page.fill("#f-text", wanted)
    page.select_option("#f-order", "oldest")
    wait_for_shown(page, len(groups))
    page.focus("#list")
    page.keyboard.press("Home")
    page.wait_for_function("wanted => document.querySelector('#group h3')?.textContent === wanted", arg=f"Group {min(groups)}")
    assert page.text_content("#group h3") == f"Group {min(groups)}"
    samples = [row for row in table if row["group"] == min(groups)]
    cards = page.locator("#group .card")
    for fold in page.locator("#group .card h4 button").all():
        fold.click()
    assert cards.count() == len(samples) == 4
    for place, row in enumerate(samples):
        card = cards.nth(place)
        text = card.locator(".text").text_content()
        assert re.sub("<(eos|pad|bos|unk)>", "", text) == row["completion"], "every token's text, one after the other"
        assert card.locator(".text span").count() == len(row["token_ids"])
        facts = card.locator("dl").inner_text()
        assert "digits" in facts and "brevity × 0.5" in facts and row["worker"] in facts and row["finish"] in facts
    assert page.locator(".text span.hit").count() > 0


@pytest.mark.slow
def test_tokens_are_coloured_by_logprob_advantage_or_version_and_tell_more(page: Any, log: KafkaLog, recorded: RecordedRun) -> None:
    number = page.evaluate("data.g_number[Array.from(data.g_status).indexOf(0)]")
    page.evaluate("number => openGroup(data.byNumber.get(number))", number)
    page.wait_for_function("number => document.querySelector('#group h3')?.textContent === `Group ${number}`", arg=number)
    for fold in page.locator("#group .card h4 button").all():
        fold.click()
    row = next(row for row in RunTables(log, recorded.run).samples().to_pylist() if row["group"] == number and row["sample"] == 0)

    def colours() -> list[str]:
        return page.evaluate("[...document.querySelectorAll('#group .card .text span')].map((one) => one.style.background)")

    by = {}
    for name in ("logprob", "advantage", "version", "none"):
        page.click(f".colour [data-by={name}]")
        by[name] = colours()
        assert page.get_attribute(f".colour [data-by={name}]", "aria-pressed") == "true"
    assert len(set(by["logprob"])) > 4
    assert 1 < len(set(by["advantage"])) <= 4
    assert len(set(by["version"])) >= 1 and by["version"] != by["logprob"] and set(by["none"]) == {""}
    page.hover("#group .card .text span >> nth=0")
    tip = page.inner_text("#tip")
    assert f"token 0: id {row['token_ids'][0]}" in tip
    records = float(re.search(r"logprob (-?[\d.]+) nat", tip)[1])
    assert records == pytest.approx(row["behaviour_logprobs"][0], abs=6e-4)
    assert f"policy version {row['policy_version_min']}" in tip
    page.focus("#group .card .text >> nth=0")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert page.inner_text("#tip").startswith("token 1:")


def test_text_that_looks_like_markup_is_shown_as_text(watched: Watched, tmp_path: Path) -> None:
    records = []
    for record in RecordBuilder(steps=1).whole():
        evil = lambda samples: tuple(replace(sample, completion=EVIL) for sample in samples)  # noqa: E731
        records += rewritten(record, prompt=EVIL, reason=EVIL, samples=evil) if record.topic.endswith(".groups") else [record]
    path = tmp_path / "evil.html"
    write(build(log_with(records), RUN), path)
    page = watched.open(path)
    page.evaluate("openGroup(0)")
    page.wait_for_selector("#group .card")
    assert page.text_content("#group .prompt >> nth=0") == EVIL
    assert EVIL in page.locator("#group .card").nth(0).text_content()
    assert EVIL in page.locator("#picked .card").nth(0).text_content()
    assert page.locator("#group .note").nth(0).text_content() == EVIL
    assert page.locator("img").count() == 0
    page.fill("#f-text", "onerror=alert")
    wait_for_shown(page, 4)


@pytest.mark.slow
def test_a_run_that_has_only_begun_is_shown_as_far_as_it_is(watched: Watched, tmp_path: Path) -> None:
    builder = RecordBuilder(steps=3)
    begun = [builder.record(), builder.opened(), builder.version(0)]
    drawn = [record for record in builder.group([0.0] * 4, version=0) if not record.topic.endswith(".groups")]
    for name, records in {"first.html": begun[:1], "open.html": [*begun, *drawn]}.items():
        write(build(log_with(records), RUN), tmp_path / name)
    page = watched.open(tmp_path / "open.html")
    assert page.text_content("#status") == "running"
    page.evaluate("openGroup(0)")
    page.wait_for_selector("#group .card")
    assert page.locator("#group .card h4").nth(0).text_content().startswith("sample 0")
    assert page.locator("#group .card h4").nth(0).text_content().endswith("not scored")
    assert watched.complaints == []
    page = watched.open(tmp_path / "first.html")
    assert shown(page) == 0
    watched.complaints = [one for one in watched.complaints if not one.endswith("first.html")]  # the listener of the first address


@pytest.mark.slow
def test_twenty_thousand_samples_stay_below_25_mb_and_are_ready_in_two_seconds() -> None:
    command = [sys.executable, "-m", "benchmarks", "page", "--samples", "20000", "--opens", "3", "--json"]
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
    assert "the folder does not exist" in capsys.readouterr().err
    assert main(["report", recorded.run, "--tokens", "5", "--bootstrap", recorded.bootstrap]) == 2
    assert "--tokens needs --html PATH" in capsys.readouterr().err
