"""The page of a run as data: what is in it, what is left out and said so, and that no text of a run becomes markup."""

import base64
import hashlib
import html
import json
import re
import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models

from penstock.infra.memory.log import MemoryLog
from penstock.infra.paths import write_complete
from penstock.pipeline.algorithms.advantages import group_advantages
from penstock.pipeline.data.tokenization import digests
from penstock.pipeline.inspect.live.completions import shared
from penstock.pipeline.inspect.report.headline import headline
from penstock.pipeline.inspect.report.summary import collect
from penstock.pipeline.inspect.run_view import RunView
from penstock.pipeline.inspect.tables.token_texts import TokenTexts
from penstock.pipeline.inspect.web.build import NOTES_BYTES, Limits, Page, PageTooSlow, build
from penstock.pipeline.inspect.web.chunks import LOGPROB_STEP, logprobs, pack
from penstock.pipeline.inspect.web.run_facts import status_shares
from penstock.pipeline.inspect.web.timeline import NEVER, Clock, generic
from penstock.topics.catalogue import RUNS_SPEC, RUNS_TOPIC, topics_of
from penstock.topics.runs import RunRecord
from penstock.topics.wire.record import Outgoing
from tests.support.a_run import RUN, RecordBuilder, view_of
from tests.support.page_records import EVIL, log_with, rewritten
from tests.support.page_records import write as write_records

STEPS = 3


def blocks(page: Page) -> dict[str, bytes]:
    found = re.findall(rb'<script type="application/octet-stream" id="(\w+)">([^<]*)</script>', page.html)
    return {name.decode(): zlib.decompress(base64.b64decode(data)) for name, data in found}


def unpacked(raw: bytes) -> dict[str, Any]:
    """Facts and columns, read as the page's own code reads them."""
    (length,) = struct.unpack_from("<I", raw)
    head, place = json.loads(raw[4 : 4 + length]), 4 + length
    found = dict(head["facts"])
    for name, kind, count in head["columns"]:
        width = int(kind[1:])
        planes = np.frombuffer(raw, np.uint8, count * width, place).reshape(width, count)
        found[name] = np.ascontiguousarray(planes.T).view(f"<{kind}").ravel()
        place += count * width
    assert place == len(raw)
    return found


def report_in(page: Page) -> dict[str, Any]:
    (text,) = re.findall(r'<pre tabindex="0" aria-label="All figures">([^<]*)</pre>', page.html.decode())
    return json.loads(html.unescape(text))


def curves_in(page: Page) -> dict[str, dict[str, Any]]:
    """Title of a chart -> label -> its points."""
    (text,) = re.findall(rb'<script type="application/json" id="curves">(.*?)</script>', page.html)
    found = json.loads(text)
    charts = [*found["main"], *found["charts"], *found["more"]]
    return {chart["title"]: {one["label"]: list(zip(one["x"], one["y"], strict=True)) for one in chart["series"]} for chart in charts}


@pytest.fixture(scope="module")
def log() -> MemoryLog:
    """A finished run of three steps, one group filtered and one unused, with a dead letter and two records of nobody's."""
    builder = RecordBuilder(steps=STEPS)
    nobodys = [Outgoing(topic=f"{RUN}.{topic}", partition=0, key=b"1", headers=(), value=b"?") for topic in ("groups", "rollouts")]
    return log_with([*builder.whole(), builder.letter(), *nobodys])


@pytest.fixture(scope="module")
def page(log: MemoryLog) -> Page:
    return build(log, RUN)


def test_the_page_holds_the_report_and_every_group_and_sample(log: MemoryLog, page: Page) -> None:
    index, report = unpacked(blocks(page)["index"]), collect(log, RUN)
    assert report_in(page) == report
    assert all(html.escape(line) in page.html.decode() for line in headline(report))
    assert index["g_number"].tolist() == list(range(8))
    assert [index["statuses"][fate] for fate in index["g_status"]] == ["filtered", *["trained"] * 6, "unused"]
    assert index["g_step"].tolist() == [-1, 0, 0, 1, 1, 2, 2, -1]
    assert index["g_reward"].tolist() == [0.0, 0.0, 0.0, 0.5, 0.5, 1.0, 1.0, 1.0]
    assert index["g_size"].tolist() == [4] * 8
    assert len(index["s_reward"]) == report["samples"] == 32
    assert int(index["s_tokens"].sum()) == report["tokens"]
    assert index["reward_names"] == ["exact_match"]
    assert curves_in(page)["Loss"]["loss"] == [(0, 1.0), (1, 0.5), (2, pytest.approx(1 / 3, rel=1e-5))]
    assert "<td>undecodable</td><td><code>groups/0/0</code></td>" in page.html.decode()
    assert page.facts["left_out"] == []


def test_details_of_a_group_are_its_texts_tokens_and_versions(page: Page) -> None:
    found = blocks(page)
    index, tokens = unpacked(found["index"]), unpacked(found["k0"])
    prompt, columns, completions = json.loads(found["x0"])[index["g_slot"][7]]
    assert (prompt, columns, completions) == ("3 4", "{}", ["5"] * 4)
    assert tokens["samples"] == [4] * 8
    assert tokens["length"].tolist() == [3] * 28 + [9] * 4
    assert tokens["id"][-9:].tolist() == list(range(9))
    assert tokens["span_version"][-1] == STEPS - 1
    assert (tokens["logprob"] == 0).all()


def test_every_worker_has_a_lane_and_what_it_did_is_dated_from_when_the_run_was_created(page: Page) -> None:
    index = unpacked(blocks(page)["index"])
    assert {worker["name"] for worker in index["workers"]} >= {"feeder", "rollout-0", "scorer-0", "trainer", "evaluator"}
    kinds = [index["kinds"][kind] for kind in index["i_kind"]]
    assert kinds.count("train") == STEPS and kinds.count("publish") == STEPS + 1
    began = index["s_start"] * index["tick_ms"] / 1000
    assert began[4] == pytest.approx(2.0)  # the first sample of the first step, two seconds after the run's record


def test_logprobs_come_back_to_half_a_step_and_missing_ones_are_missing() -> None:
    given = np.array([0.0, -0.00049, -0.6931, -12.3456, -65.5, -80.0, np.nan])
    found = logprobs(given)
    assert found[-1] == 0xFFFF
    assert np.abs(found[:5] * LOGPROB_STEP + given[:5]).max() <= LOGPROB_STEP / 2 + 1e-9
    assert found[5] == 0xFFFE  # below what 16 bits hold: the lowest there is


def test_columns_of_every_width_come_out_as_they_went_in() -> None:
    given = {
        "a": np.array([1, 255, 0], np.uint8),
        "b": np.array([1, 65535], np.uint16),
        "c": np.array([-(1 << 31), (1 << 31) - 1, 0], np.int32),
        "d": np.array([0.1, np.nan], np.float32),
        "e": np.zeros(0, np.int32),
    }
    found = unpacked(zlib.decompress(base64.b64decode(pack({"text": "naïve", "none": float("nan")}, given))))
    assert (found["text"], found["none"]) == ("naïve", None)
    for name, column in given.items():
        assert found[name].dtype == column.dtype
        np.testing.assert_array_equal(found[name], column)


def test_advantages_are_those_of_the_runs_own_function() -> None:
    builder = RecordBuilder(steps=1)
    log = log_with([*builder.start(), builder.version(0), *builder.group([0.0, 1.0, 1.0, 0.25], version=0)])
    index = unpacked(blocks(build(log, RUN))["index"])
    assert index["advantage"] == {"name": "grpo", "why_not": None}
    np.testing.assert_array_equal(index["s_advantage"], group_advantages([0.0, 1.0, 1.0, 0.25]))


def test_a_function_that_the_log_names_is_loaded_only_by_who_trusts_it(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text("import numpy as np\n\ndef doubled(rewards):\n    return 2 * np.asarray(rewards, np.float32)\n")
    builder = RecordBuilder(steps=1, config={"algorithm": {"advantage": f"{own}:doubled"}})
    log = log_with([*builder.start(), *builder.group([0.0, 1.0, 1.0, 0.25], version=0)])
    with_own = unpacked(blocks(build(log, RUN, trust_code=True))["index"])
    without = unpacked(blocks(build(log, RUN))["index"])
    assert with_own["s_advantage"].tolist() == [0.0, 2.0, 2.0, 0.5]
    assert np.isnan(without["s_advantage"]).all()
    assert "pass --trust-code to load it" in without["advantage"]["why_not"]


def test_beyond_the_budget_older_tokens_are_left_out_and_the_page_says_so(log: MemoryLog) -> None:
    page = build(log, RUN, limits=Limits(tokens=60))
    found = blocks(page)
    index, tokens = unpacked(found["index"]), unpacked(found["k0"])
    assert page.facts["tokens"] == [60, 120]  # the newest group has 36, the two before it 12 each
    assert index["g_detail"].tolist() == [0] * 5 + [1] * 3
    assert tokens["samples"] == [0] * 5 + [4] * 3
    assert len(json.loads(found["x0"])) == 8  # texts have a budget of their own
    assert page.facts["left_out"] == ["60 of 120 tokens are here one by one, the newest."]
    assert index["contents"]["left_out"] == page.facts["left_out"]


def test_a_page_never_exceeds_its_size(log: MemoryLog) -> None:
    whole = build(log, RUN)
    least = build(log, RUN, limits=Limits(max_bytes=1))
    assert least.facts["texts"][0] == least.facts["tokens"][0] == 0
    assert len(least.facts["left_out"]) == 2
    assert set(blocks(build(log, RUN, limits=Limits(max_bytes=len(whole.html) + NOTES_BYTES)))) == set(blocks(whole))
    tokens_dropped = build(log, RUN, limits=Limits(max_bytes=len(whole.html) + NOTES_BYTES - 400))
    assert len(tokens_dropped.html) <= len(whole.html) + NOTES_BYTES - 400
    assert set(blocks(whole)) - set(blocks(tokens_dropped)) == {"k0"}
    assert set(blocks(least)) == {"index", "vocabulary"}


def test_more_tokens_than_usual_lift_the_limit_of_the_size_and_fewer_do_not() -> None:
    usual = Limits()
    assert usual.with_tokens(10) == replace(usual, tokens=10)
    more = usual.with_tokens(10**8)
    assert (more.tokens, more.text_tokens, more.samples) == (10**8, 10**8, 5 * 10**6)
    assert more.max_bytes > 10**12


def test_of_very_many_groups_the_newest_are_listed(log: MemoryLog) -> None:
    page = build(log, RUN, limits=Limits(samples=10))
    index = unpacked(blocks(page)["index"])
    assert index["g_number"].tolist() == [6, 7]
    assert report_in(page)["samples"] == 32
    assert page.facts["left_out"][0] == "2 of 8 groups are listed, the newest; figures and curves are of the whole run."


def test_no_text_of_a_run_becomes_markup() -> None:
    built: list[Outgoing] = []
    for record in RecordBuilder(steps=1).whole():
        if record.topic.endswith(".groups"):
            evil = lambda samples: tuple(replace(sample, completion=EVIL) for sample in samples)  # noqa: E731
            built += rewritten(record, prompt=EVIL, reason=EVIL, columns=json.dumps({"x": EVIL}), samples=evil)
        else:
            built.append(record)
    page = build(log_with(built), RUN)
    assert b"<img" not in page.html and b"\xe2\x80\xa8" not in page.html
    assert json.loads(blocks(page)["x0"])[0][0] == EVIL
    # The browser's view of it: only our own elements, the code's included.
    assert len(re.findall(rb"<script", page.html)) == len(blocks(page)) + 2 == len(re.findall(rb"</script", page.html))


def test_only_the_pages_own_code_and_style_may_run_and_nothing_may_be_fetched(page: Page) -> None:
    text_of_page = page.html.decode()
    found = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text_of_page)
    assert found is not None
    policy = html.unescape(found[1])
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'" and "unsafe" not in policy
    for kind, text in (
        ("script-src", re.search(r"<script>(.*?)</script>", text_of_page, re.S)),
        ("style-src", re.search(r"<style>(.*?)</style>", text_of_page, re.S)),
    ):
        assert text is not None
        assert rules[kind] == f"'sha256-{base64.b64encode(hashlib.sha256(text[1].encode()).digest()).decode()}'"
    assert not re.findall(r"(?:src|href)=\"(?!#)", text_of_page.split("<script>")[0])
    assert "innerHTML" not in text_of_page and "eval(" not in text_of_page


def test_groups_without_rewards_show_their_prompt_and_what_was_drawn() -> None:
    builder = RecordBuilder(steps=1)
    built = [*builder.start(), builder.version(0)]
    waiting = [record for record in builder.group([0.0] * 4, version=0) if not record.topic.endswith(".groups")]
    failed = builder.group([0.0] * 4, version=0, outcome="failed")
    outcome = rewritten(failed[-1], samples=lambda _: (), reason="the judge broke")
    page = build(log_with([*built, *waiting, *failed[:-1], *outcome]), RUN)
    found = blocks(page)
    index, tokens = unpacked(found["index"]), unpacked(found["k0"])
    assert [index["statuses"][fate] for fate in index["g_status"]] == ["open", "failed"]
    assert index["g_size"].tolist() == [4, 4] and np.isnan(index["s_reward"]).all()
    assert index["reasons"] == {"1": "the judge broke"}
    assert [text[0] for text in json.loads(found["x0"])] == ["3 4", "3 4"]
    assert tokens["samples"] == [4, 4]
    assert index["no_texts"] is not None  # the model's directory is elsewhere, and the page says so


class Growing(MemoryLog):
    """A log to which a run writes while it is read: more records before every tail."""

    def __init__(self, later: Iterable[Outgoing]) -> None:
        super().__init__()
        self.later = list(later)

    def tail(self, *args: Any, **how: Any) -> Any:
        opened = super().tail(*args, **how)
        for record in self.later[:7]:
            self.producer().send(record)
        del self.later[:7]
        return opened


def test_a_page_of_a_run_under_way_lists_what_its_figures_count() -> None:
    built = list(RecordBuilder(steps=6).whole())
    log = Growing(built[20:])
    log.create_topics({RUNS_TOPIC: RUNS_SPEC, **topics_of(RUN, partitions=1)})
    write_records(log, built[:20])
    page = build(log, RUN)
    index, report = unpacked(blocks(page)["index"]), report_in(page)
    assert len(log.later) < len(built) - 20
    counts = report["groups"]
    assert len(index["g_number"]) == counts["admitted"] > 0
    for number, fate in enumerate(index["statuses"]):
        assert int((index["g_status"] == number).sum()) == counts[fate]
    assert len(index["s_reward"]) == report["samples"]
    assert int((~np.isnan(index["g_reward"])).sum()) == sum(record.topic.endswith(".groups") for record in built[:20])


def test_a_page_that_takes_too_long_is_given_up(log: MemoryLog) -> None:
    with pytest.raises(PageTooSlow, match="it was not ready within 0 s"):
        build(log, RUN, limits=Limits(seconds=0.0))


def test_a_run_that_is_not_there_is_one_line(log: MemoryLog) -> None:
    with pytest.raises(ValueError, match="no run 'demo-2' on this broker"):
        build(log, "demo-2")


def test_whoever_waits_is_asked_while_records_are_read(log: MemoryLog) -> None:
    calls: list[None] = []
    build(log, RUN, alive=lambda: calls.append(None))
    assert len(calls) >= 3


def test_a_page_gets_its_name_only_when_it_is_whole(page: Page, tmp_path: Path) -> None:
    path = tmp_path / "out.html"
    path.write_text("the one before")
    write_complete(path, page.html)
    assert path.read_bytes() == page.html
    assert [file.name for file in tmp_path.iterdir()] == ["out.html"]


def registered(folder: Path, **info: Any) -> RunView:
    config, now = json.dumps({"model": {"path": str(folder)}}), 1
    record = RunRecord(run=RUN, status="created", config=config, info=json.dumps(info), created_ns=now, updated_ns=now)
    return RunView(run=RUN, record=record)


def test_each_token_has_the_text_it_has_behind_another_one(tmp_path: Path) -> None:
    for name, words, decoder, expected in (
        ("bytes", ["a", "Ġthe", "Ã", "©"], decoders.ByteLevel(), ["a", " the", "\ufffd", "\ufffd", "<|end|>"]),
        ("pieces", ["a", "▁the", "s"], decoders.Metaspace(prepend_scheme="always"), ["a", " the", "s", "<|end|>"]),
    ):
        tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="a"))
        tokenizer.add_special_tokens(["<|end|>"])
        tokenizer.decoder = decoder
        (tmp_path / name).mkdir()
        tokenizer.save(str(tmp_path / name / "tokenizer.json"))
        texts = TokenTexts.of(registered(tmp_path / name))
        assert texts.why_not is None
        assert texts.one_by_one(list(range(len(expected)))) == expected
        assert texts.completion([1, len(words)]) == tokenizer.decode([1])


def test_a_tokenizer_that_is_not_the_runs_own_gives_no_texts(tmp_path: Path) -> None:
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    own = digests(tmp_path, chat_template="off")
    assert TokenTexts.of(registered(tmp_path, digests=own)).why_not is None
    other = TokenTexts.of(registered(tmp_path, digests={**own, "tokenizer": "0" * 64}))
    assert "is not the one that the run was created with" in (other.why_not or "")
    assert other.completion([0]) is None and other.one_by_one([0]) == []


@pytest.mark.parametrize(
    ("text", "label"),
    [("step 12: 3 of 8 groups are here", "step N: N of N groups are here"), ("training step 3", "training step N"), ("", "starting")],
)
def test_texts_of_workers_are_counted_without_their_numbers(text: str, label: str) -> None:
    assert generic(text) == label


def test_moments_are_whole_ticks_and_an_unknown_one_is_no_moment() -> None:
    short, long = Clock.of(zero_ns=10**9, last_ns=2 * 10**9), Clock.of(zero_ns=0, last_ns=30 * 86400 * 10**9)
    assert short.tick_ms == 0.1 and long.tick_ms == 10.0
    assert short.ticks([10**9 + 250_000, 10**9 - 10**6, 0]).tolist() == [2, -10, NEVER]


def test_what_all_prompts_begin_with_is_found() -> None:
    prompts: Sequence[str] = ["Question: 1+1", "Question: 2+2", "Question: 1+2"]
    common = prompts[0]
    for prompt in prompts:
        common = shared(common, prompt)
    assert common == "Question: "
    assert shared("same", "same") == "same"


def test_what_was_written_twice_is_shown_once() -> None:
    built = list(RecordBuilder(steps=1).whole())
    again = [record for record in built if record.topic.endswith((".rollouts", ".groups"))]
    index = unpacked(blocks(build(log_with([*built, *again]), RUN))["index"])
    assert len(index["s_reward"]) == 16


def test_what_became_of_the_groups_is_a_curve_whose_points_stand_for_enough_of_them() -> None:
    builder = RecordBuilder(steps=40)
    built = [*builder.start(), builder.version(0)]
    for step in range(40):
        built += builder.group([0.0] * 4, version=step, outcome="filtered")
        built += builder.round(step)
    points = status_shares(view_of(built))
    assert [step for step, _ in points] == sorted({step for step, _ in points})
    assert len(points) == 7  # of 120 groups: six versions of three groups each, and what is left
    assert all(shares == {"filtered": pytest.approx(1 / 3), "trained": pytest.approx(2 / 3)} for _, shares in points)
    assert status_shares(RunView(run=RUN)) == []
