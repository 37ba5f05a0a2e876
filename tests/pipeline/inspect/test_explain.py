"""The life of a prompt from runs written record by record: fates that a small real run does not have, repeats, dead letters, stages."""

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.infra.errors import LogError
from penstock.infra.memory.log import MemoryLog
from penstock.pipeline.algorithms import losses
from penstock.pipeline.algorithms.registry import AGGREGATES
from penstock.pipeline.config.load import Config, ConfigError
from penstock.pipeline.inspect.explain import as_json, text
from penstock.pipeline.inspect.explain.as_json import left_out, shares
from penstock.pipeline.inspect.explain.group_history import stages
from penstock.pipeline.inspect.records import browse
from penstock.pipeline.inspect.report.summary import collect
from penstock.pipeline.learner.micro_batches import pack, token_share
from penstock.pipeline.learner.train_step import Objective
from penstock.topics import dead_letters, groups, rollouts
from penstock.topics.groups import Group, ScoredSample
from penstock.topics.ledger import Planned
from penstock.topics.wire.record import Outgoing, Record
from tests.support.a_run import CONFIG, RUN, RecordBuilder, outgoing, stored, with_group
from tests.support.examples import sample_of
from tests.support.least_config import least_config
from tests.support.page_records import log_with


def quiet(_: str) -> None:
    """Nothing is said."""


def explained(built: Iterable[Outgoing], group: int) -> dict[str, Any]:
    """The life of a group, having gone through JSON; its page can be made."""
    found = json.loads(json.dumps(as_json.explain(log_with(built), RUN, group, notify=quiet)))
    assert text.as_page(found)
    return dict(found)


def planned(log: MemoryLog, members: list[int]) -> tuple[Planned, ...]:
    """A plan that points to the groups' true places."""
    found = {}
    for record in log.tail({(f"{RUN}.groups", 0): "earliest"}).read_to_end(1.0):
        headers = groups.check(record, run=RUN)
        found[headers.group] = Planned(group=headers.group or 0, sha256=headers.sha256 or "", partition=0, offset=record.offset)
    return tuple(found[number] for number in members)


def test_a_stale_group_says_against_which_version_and_which_entry_says_so() -> None:
    builder = RecordBuilder(config={"schedule": {**CONFIG["schedule"], "mode": "one_step_off"}})
    built = [*builder.start(), builder.version(0), *builder.group([0.0, 1.0], version=0)]
    built += [builder.version(1), builder.version(2), builder.entry("stale", step=2, version=2, groups=(0,))]
    found = explained(built, 0)
    assert found["status"] == "stale"
    stale = {"entry": 4, "at_s": builder.now_s, "before_step": 2, "learner_version": 2, "policy_version_min": 0, "lag": 2, "max_lag": 1}
    assert found["stale"] == stale
    why = "the oldest trained token was generated under version 0, 2 versions before the learner's 2; max_lag is 1 (ledger entry 4)"
    assert found["why"] == why
    assert "stale at" in text.as_page(found)


def test_an_abandoned_group_says_why_and_shows_what_was_drawn() -> None:
    builder = RecordBuilder()
    built = [*builder.start(), builder.version(0), *builder.group([0.0, 1.0], version=0, outcome="abandoned")]
    found = explained(built, 0)
    assert (found["status"], found["why"]) == ("abandoned", "because")
    assert [one["sample"] for one in found["samples"]] == [0, 1]


def test_an_open_group_says_what_it_waits_for_stage_by_stage() -> None:
    builder = RecordBuilder()
    prompt, first, second, outcome = builder.group([0.0, 1.0], version=0)
    start = [*builder.start(), builder.version(0)]
    waited = [explained([*start, *more], 0)["why"] for more in ([prompt], [prompt, first], [prompt, first, second])]
    assert waited == [
        "waits for a rollout worker; none of its samples is in the log",
        "waits for samples: 1 of 2 are there",
        "waits for the scorer of its partition; all its samples are in the log",
    ]
    assert explained([*start, prompt, first, second, outcome], 0)["why"].startswith("waits for the trainer, which takes groups by number")
    later = RecordBuilder()
    held = explained([*later.start(), later.version(0), later.group([0.0, 1.0], version=3)[0]], 0)["why"]
    assert "policy version 3, under which it may be generated at the earliest; the newest is 0" in held


def test_a_group_that_the_run_did_not_need_is_unused() -> None:
    found = explained(RecordBuilder(steps=3).whole(), 7)
    assert (found["status"], found["why"].partition(";")[0]) == ("unused", "the run ended first")


def test_a_plan_that_cannot_be_read_leaves_the_rest_of_the_story() -> None:
    found = explained(RecordBuilder(steps=3).whole(), 1)
    assert found["status"] == "trained"
    assert (found["step"]["plan"], found["step"]["denominator"]) == ([1, 2], None)
    assert found["step"]["left_out"][0].startswith("advantages and gradient weights cannot be computed: ")
    assert [one["token_weight"] for one in found["samples"]] == [None] * 4


def test_a_plan_is_read_from_where_the_ledger_says() -> None:
    builder = RecordBuilder()
    built = [*builder.start(), builder.version(0), *builder.group([0.0, 1.0], version=0), *builder.group([0.0, 0.5], version=0)]
    plan = planned(log_with(built), [1, 0])
    step = builder.entry("step", step=0, version=0, plan=plan, boundaries=(2, 4), metrics={"grad_norm": 4.0})
    found = explained([*built, step, builder.version(1)], 0)
    assert found["why"] == "step 0, position 2 of 2 in its plan, under learner version 0"
    assert [one["micro_batch"] for one in found["samples"]] == [1, 1]
    advantages = [one["advantage"] for one in found["samples"]]
    assert advantages == pytest.approx([-0.7070068, 0.7070068], rel=1e-5)  # (0 - 0.5) / (0.7071068 + 1e-4)
    assert found["step"]["denominator"] == 4.0
    assert [one["weight"] for one in found["samples"]] == pytest.approx([one / 4 for one in advantages])
    assert found["step"]["clipped"] == pytest.approx(0.25)
    assert found["step"]["left_out"] == []  # strictly on-policy at S = 1: no ratio, no correction
    assert found["version"]["version"] == 1


def test_a_plan_of_many_groups_is_shown_by_its_first_ones() -> None:
    found = explained(RecordBuilder(steps=3).whole(), 1)
    found["step"] |= {"plan": list(range(1, 1001)), "boundaries": [4000]}
    line = next(line for line in text.as_page(found).splitlines() if "position 1 of 1000" in line)
    assert "(groups 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, … 1000 in all)" in line
    assert "(samples end at 4000)" in line


def test_records_that_repeat_others_are_shown_and_do_not_count() -> None:
    builder = RecordBuilder()
    built = builder.group([0.0, 1.0], version=0)
    found = explained([*builder.start(), *built, built[1], built[-1]], 0)
    assert [(one["is"], one["counts"]) for one in found["records"]] == [
        ("prompt", True), ("sample 0", True), ("sample 1", True), ("sample 0", False), ("outcome scored", True), ("outcome scored", False),
    ]  # fmt: skip
    assert [one["place"] for one in found["samples"]] == ["rollouts/0/0", "rollouts/0/1"]


def test_samples_beyond_the_first_k_are_surplus() -> None:
    builder = RecordBuilder()
    built = builder.group([0.0, 1.0, 0.5], version=0)
    whole = groups.decode(built[-1].value)
    kept = replace(whole, samples_per_prompt=2, samples=(whole.samples[0], whole.samples[2]))
    found = explained([*builder.start(), *built[:-1], *with_group(built[-1], kept)], 0)
    assert [(one["sample"], one["counts"]) for one in found["samples"]] == [(0, True), (1, False), (2, True)]


def test_tokens_of_several_versions_are_shown_as_spans() -> None:
    builder = RecordBuilder()
    prompt, first, *_ = builder.group([0.0, 1.0], version=0)
    drawn = replace(rollouts.decode(first.value), span_versions=np.array([1, 2], np.int32), span_starts=np.array([0, 2], np.int32))
    found = explained([*builder.start(), prompt, outgoing(rollouts, drawn)], 0)
    assert found["samples"][0]["versions"] == [{"version": 1, "from": 0, "to": 2}, {"version": 2, "from": 2, "to": 3}]
    assert "1[0:2] 2[2:3]" in text.as_page(found)


def refused(builder: RecordBuilder, record: Record, *, kind: str, reason: str) -> Outgoing:
    letter = dead_letters.from_record(record, kind=kind, reason=reason, worker="scorer-0", time_ns=int(builder.now_s * 1e9))
    return outgoing(dead_letters, letter)


def letter_of(log: MemoryLog) -> dict[str, Any]:
    """The first dead letter as `penstock topics show` gives it; its page can be made."""
    letter = browse.view(browse.record_at(log, RUN, "dead-letters", partition=0, offset=0), run=RUN)
    assert browse.as_page(letter)
    return dict(json.loads(json.dumps(letter)))


def test_a_dead_letter_shows_the_refused_record_and_the_group_that_it_claims() -> None:
    builder = RecordBuilder()
    built = builder.group([0.0, 0.0], version=0, outcome="filtered")
    torn = replace(built[1], value=built[1].value[:100])
    letter = refused(builder, stored(torn, 2), kind="checksum", reason="the headers say one thing, the payload another")
    log = log_with([*builder.start(), *built, torn, letter])
    found = letter_of(log)
    assert found["payload"]["kind"] == "checksum"
    assert found["refused"]["topic"] == f"{RUN}.rollouts"
    assert found["refused"]["unusable"].startswith("checksum: ")
    assert found["claims_group"] == 0
    claimed = as_json.explain(log, RUN, 0, notify=quiet)
    assert claimed["status"] == "filtered"
    assert [(one["offset"], one["of"]) for one in claimed["dead_letters"]] == [(0, "rollouts/0/2")]
    assert any(one["is"].startswith("unusable: ") for one in claimed["records"])


def test_a_dead_letter_that_claims_a_group_which_never_was_leads_to_one_line() -> None:
    builder = RecordBuilder()
    built = builder.group([0.0, 1.0], version=0)
    orphan = replace(stored(built[1], 9), headers=(("run", RUN.encode()), ("group", b"77")), key=b"77")
    log = log_with([*builder.start(), *built, refused(builder, orphan, kind="orphan", reason="no prompt")])
    assert letter_of(log)["claims_group"] == 77
    with pytest.raises(ConfigError, match=f"group 77 was never admitted: run {RUN} has groups 0 to 0"):
        as_json.explain(log, RUN, 77, notify=quiet)


def test_a_record_that_ends_its_readers_is_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    builder = RecordBuilder()
    built = builder.group([0.0, 1.0], version=0)
    letter = refused(builder, stored(built[1]), kind="poison", reason="three processes died")
    decoded: list[int] = []
    original = rollouts.decode_all
    monkeypatch.setattr(rollouts, "decode_all", lambda value: decoded.append(len(value)) or original(value))
    found = explained([*builder.start(), *built[:-1], letter], 0)
    assert len(decoded) == 1  # of two samples
    assert [one["sample"] for one in found["samples"]] == [1]
    assert found["why"] == "waits for samples: 1 of 2 are there"
    assert letter_of(log_with([*builder.start(), *built[:-1], letter]))["refused"] is None
    assert len(decoded) == 1


def test_a_letter_about_other_topics_claims_no_group() -> None:
    builder = RecordBuilder()
    built = builder.group([0.0, 1.0], version=0)
    chunk = Record(topic=f"{RUN}.weights", partition=1, offset=0, timestamp_ms=1, key=b"0", headers=(), value=b"?")
    log = [*builder.start(), *built, refused(builder, chunk, kind="missing-header", reason="no run")]
    assert letter_of(log_with(log))["claims_group"] is None
    assert explained(log, 0)["dead_letters"] == []


def test_a_prompt_that_retention_has_deleted_is_gone_and_not_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    builder = RecordBuilder()
    first, second = builder.group([0.0, 1.0], version=0), builder.group([0.0, 1.0], version=0)
    log = log_with([*builder.start(), first[0], second[0]])
    monkeypatch.setattr(log, "beginning_offsets", lambda places: {at: int(at[0].endswith(".prompts")) for at in places})
    with pytest.raises(LogError, match=r"the prompt of group 0 was deleted: .*prompts/0: the records at offsets 0 to 0 were deleted"):
        as_json.explain(log, RUN, 0, notify=quiet)
    with pytest.raises(ValueError, match=r"group 9 was never admitted: run demo-1 has groups 0 to 1"):
        as_json.explain(log, RUN, 9, notify=quiet)


def test_a_group_whose_samples_and_outcome_were_deleted_is_not_said_to_wait_for_them() -> None:
    builder = RecordBuilder()
    first, second = builder.group([0.0, 1.0], version=0, outcome="filtered"), builder.group([0.0, 1.0], version=0)
    log = log_with([*builder.start(), *first, *second])
    log.delete_records({(f"{RUN}.rollouts", 0): 2, (f"{RUN}.groups", 0): 1})
    found = as_json.explain(log, RUN, 0, notify=quiet)
    lines = [f"{RUN}.rollouts/0: the records at offsets 0 to 1 were deleted", f"{RUN}.groups/0: the records at offsets 0 to 0 were deleted"]
    assert found["gone"] == lines
    assert found["why"].endswith(f", unless deleted records say otherwise: {'; '.join(lines)}")
    page = text.as_page(found)
    assert "deleted by retention" in page and f"deleted\n  {lines[0]}" in page
    assert as_json.explain(log, RUN, 1, notify=quiet)["gone"] == []
    assert collect(log, RUN)["gone"] == lines


def test_a_ledger_without_its_beginning_is_said_instead_of_groups_that_seem_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    builder = RecordBuilder()
    log = log_with([*builder.start(), *builder.group([0.0, 1.0], version=0)])
    monkeypatch.setattr(log, "beginning_offsets", lambda places: {at: 3 * at[0].endswith(".ledger") for at in places})
    with pytest.raises(LogError, match=r"ledger/0: the records at offsets 0 to 2 were deleted"):
        as_json.explain(log, RUN, 0, notify=quiet)


def test_stages_lie_between_moments_that_are_known() -> None:
    found = stages({"admitted": 10.0, "begun": 11.0, "first_ended": 12.0, "last_ended": 14.0, "scored": 15.0})
    assert [tuple(one.values()) for one in found] == [
        ("waited for a worker", 0.0, 1.0),
        ("generation", 1.0, 3.0),
        ("of it waiting for the slowest sample", 2.0, 2.0),
        ("scoring", 4.0, 1.0),
    ]
    judged = stages({"admitted": 10.0, "last_ended": 14.0, "scoring_started": 14.75, "scored": 15.0})
    assert [tuple(one.values()) for one in judged] == [
        ("waited for the scorer", 4.0, 0.75),
        ("reward functions", 4.75, 0.25),
    ]
    assert stages({"admitted": 10.0}) == []
    assert stages({"begun": 11.0, "last_ended": 12.0}) == []


LENGTHS = ((3, 5), (1, 8), (4, 4))


def config_of(**algorithm: Any) -> Config:
    return least_config(algorithm=algorithm)


def a_plan() -> list[Group]:
    """Three groups with samples of different lengths, some of their tokens out of the loss mask."""
    drawn = np.random.default_rng(3)
    plan = []
    for number, lengths in enumerate(LENGTHS):
        samples = [scored_sample(number, sample, tokens, reward=float(drawn.random())) for sample, tokens in enumerate(lengths)]
        built = groups.decode(RecordBuilder().group([0.0, 1.0], version=0)[-1].value)
        plan.append(replace(built, group=number, samples=tuple(samples)))
    return plan


def scored_sample(group: int, sample: int, tokens: int, *, reward: float) -> ScoredSample:
    mask, logprobs = np.arange(tokens) >= tokens // 4, np.full(tokens, -1.0, np.float32)
    finish = "length" if tokens == 8 else "stop"
    rollout = sample_of(group, sample, range(tokens), behaviour_logprobs=logprobs, loss_mask=mask, finish=finish)
    return ScoredSample(rollout=rollout, completion="?", reward=reward, components=(reward,))


@pytest.mark.parametrize("aggregate", AGGREGATES)
@pytest.mark.parametrize("loss", ["grpo", "gspo", "cispo"])
def test_gradient_weights_are_minus_the_loss_derivatives_for_every_loss_and_aggregation(loss: str, aggregate: str) -> None:
    config, plan = config_of(loss=loss, aggregate=aggregate), a_plan()
    objective = Objective.of(config)
    batch = pack([sequence for group in plan for sequence in objective.sequences(group)])
    logprobs = torch.tensor(batch.behaviour_logprobs, requires_grad=True)
    summed, _ = objective.batch_loss(logprobs, batch)
    found = shares(plan, config=config)
    (summed / found.denominator).backward()
    assert logprobs.grad is not None
    gradients = [-logprobs.grad[row].numpy()[batch.completion_mask[row]] for row in range(len(found.samples))]
    for one, gradient in zip(found.samples, gradients, strict=True):
        assert gradient == pytest.approx(np.full(one.tokens, one.token_weight), rel=1e-5)


@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_what_a_token_counts_is_what_the_loss_counts_it(aggregate: str) -> None:
    mask = torch.tensor([[True, True, False], [True, True, True]])
    weights = losses.token_weights(mask, aggregate=aggregate, max_tokens=7)
    assert [row[0].item() for row in weights] == pytest.approx([token_share(n, aggregate=aggregate, max_tokens=7) for n in (2, 3)])


def test_a_sample_that_ran_out_of_tokens_is_masked_and_stays_in_the_mean() -> None:
    config, plan = config_of(truncated="mask"), a_plan()
    found = shares(plan, config=config, boundaries=(2, 5))
    assert sorted((one.group, one.sample) for one in found.samples) == [(0, 0), (0, 1), (1, 0), (2, 0), (2, 1)]
    assert [one.micro_batch for one in found.samples] == [0, 0, 1, 1, 1]
    assert found.of(1)[0].advantage == shares(plan, config=config_of()).of(1)[0].advantage


def test_what_the_log_cannot_tell_is_said_in_words() -> None:
    assert left_out(config_of()) == []
    lagging = {"mode": "one_step_off"}
    (said,) = left_out(least_config(schedule=lagging, algorithm={"proximal": "behaviour"}))
    assert said.startswith("each token's ratio current / behaviour")
    corrected = left_out(least_config(schedule=lagging, algorithm={"kl_coef": 0.1}))
    assert [word in " ".join(corrected) for word in ("correction weight tis", "kl_coef 0.1")] == [True, True]
    assert "in another way" in left_out(config_of(loss="own.py:loss", aggregate="token_mean"))[0]


def test_a_function_that_the_log_names_is_loaded_only_by_who_trusts_it(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\ndef doubled(rewards):\n    return rewards\n")
    config, plan = config_of(advantage=f"{own}:doubled"), a_plan()
    with pytest.raises(ValueError, match="pass --trust-code to load it"):
        shares(plan, config=config)
    assert not (tmp_path / "ran").exists()
    assert shares(plan, config=config, trust_code=True).samples
    assert (tmp_path / "ran").exists()


def test_completions_are_cut_so_that_the_rewards_fit_into_the_terminal() -> None:
    found = explained(list(RecordBuilder(steps=3).whole()), 1)
    found["samples"][0]["completion"] = "word " * 40
    wide, narrow = (text.as_page(found, width=width).splitlines() for width in (300, 110))
    assert max(map(len, wide)) > 110 >= max(len(line) for line in narrow[narrow.index("rewards") : narrow.index("outcome")])
