"""The rules of a conversation that no template has a say in."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.pipeline.data.conversation.segments import Conversation
from tests.support.chat_families import answer, ids_of, stop_ids, template

ASKED = [{"role": "user", "content": "What is 3 + 4?"}]


@pytest.fixture
def conversation() -> Conversation:
    return Conversation(template("qwen2_5"))


def draw(conversation: Conversation, messages, text: str, **settings):
    context = conversation.context(messages)
    ids = answer("qwen2_5", text)
    return context, conversation.add_completion(context, ids, [-0.5] * len(ids), [3] * len(ids), "stop", **settings)


def test_two_answers_to_one_question_are_two_segments_and_each_may_go_on(conversation: Conversation) -> None:
    first, second = conversation.context(ASKED), conversation.context(ASKED)
    said = []
    for context, text in ((second, "Eight."), (first, "Seven.")):  # the later question is answered first
        ids = answer("qwen2_5", text)
        said.append(conversation.add_completion(context, ids, [-0.5] * len(ids), [3] * len(ids), "stop").message)
    for message in said:
        draw(conversation, [*ASKED, message, {"role": "user", "content": "Sure?"}], "Yes.")
    assert [[part.turn for part in segment.parts if part.source == "model"] for segment in conversation.segments()] == [[0, 3], [1, 2]]


def test_equal_answers_that_both_go_on_are_two_segments(conversation: Conversation) -> None:
    for _ in range(2):
        draw(conversation, ASKED, "Seven.")
    said = [*ASKED, {"role": "assistant", "content": "Seven."}, {"role": "user", "content": "Sure?"}]
    for _ in range(2):
        context, _ = draw(conversation, said, "Yes.")
        assert context.prefix_tokens
    assert [segment.mask.sum() for segment in conversation.segments()] == [
        len(answer("qwen2_5", "Seven.")) + len(answer("qwen2_5", "Yes."))
    ] * 2


def test_a_third_question_after_one_answer_repeats_its_tokens_as_context(conversation: Conversation) -> None:
    _, said = draw(conversation, ASKED, "Seven.")
    for text in ("Sure?", "Really?"):
        draw(conversation, [*ASKED, said.message, {"role": "user", "content": text}], "Yes.")
    first, second = conversation.segments()
    shared = first.parts[1].end
    assert (second.token_ids[:shared] == first.token_ids[:shared]).all() and not second.mask[:shared].any()


def test_a_question_that_nobody_answered_leaves_nothing_behind(conversation: Conversation) -> None:
    lost = conversation.context(ASKED)
    conversation.add_completion(lost, [], [], [], "abort")
    _, said = draw(conversation, ASKED, "Seven.")
    conversation.context([*ASKED, said.message, {"role": "user", "content": "Sure?"}])
    draw(conversation, [*ASKED, said.message, {"role": "user", "content": "Sure?"}], "Yes.")
    (segment,) = conversation.segments()
    assert [part.source for part in segment.parts] == ["prompt", "model", "user", "model"]


def test_other_tools_are_another_history(conversation: Conversation) -> None:
    _, said = draw(conversation, ASKED, "Seven.")
    tool = {"type": "function", "function": {"name": "add", "description": "", "parameters": {}}}
    context = conversation.context([*ASKED, said.message, {"role": "user", "content": "Sure?"}], [tool])
    assert context.prefix_tokens == 0


@pytest.mark.parametrize(
    "kept",
    [
        {"role": "assistant", "content": [{"type": "text", "text": "Seven."}]},
        {"content": " Seven.\n", "role": "assistant", "refusal": None, "tool_calls": None},
    ],
    ids=["parts", "other keys and spaces"],
)
def test_a_client_may_write_an_answer_in_its_own_way(conversation: Conversation, kept) -> None:
    draw(conversation, ASKED, "Seven.")
    assert conversation.context([*ASKED, kept, {"role": "user", "content": "Sure?"}]).prefix_tokens


def test_arrays_of_different_lengths_are_refused(conversation: Conversation) -> None:
    with pytest.raises(ValueError, match=r"turn 0: shapes of ids \(2,\), logprobs \(1,\) and versions \(2,\) differ"):
        conversation.add_completion(conversation.context(ASKED), [1, 2], [-0.5], [3, 3], "stop")


@given(st.text("ab\n", max_size=8), st.text("ab\n", max_size=8))
def test_a_text_that_ends_an_answer_leaves_out_what_was_drawn_after_it(before: str, after: str) -> None:
    conversation = Conversation(template("qwen2_5"))
    context, said = draw(conversation, ASKED, f"{before}End:{after}End:", stop=("Stop", "End:"))
    assert (said.message["content"], said.finish) == (before, "stop")
    (segment,) = conversation.segments()
    assert segment.token_ids[segment.mask].tolist() == [i for letter in f"{before}End:" for i in ids_of("qwen2_5", letter)]
    follows = conversation.context([*ASKED, said.message, {"role": "user", "content": "Go on."}])
    assert follows.prefix_tokens == len(segment.token_ids)
    assert follows.token_ids[follows.prefix_tokens] == stop_ids("qwen2_5")[0]
    assert np.isnan(segment.logprobs[: len(context.token_ids)]).all()


@pytest.mark.parametrize("role", ["model", "environment", "prompt"])
def test_a_message_whose_role_is_the_name_of_a_source_is_said_by_a_user(conversation: Conversation, role: str) -> None:
    _, said = draw(conversation, ASKED, "Seven.")
    draw(conversation, [*ASKED, said.message, {"role": role, "content": "Sure?"}], "Yes.")
    (segment,) = conversation.segments()
    assert [part.source for part in segment.parts] == ["prompt", "model", "user", "model"]


@given(st.text(min_size=0, max_size=40), st.integers(1, 20))
def test_a_text_is_cut_by_tokens_and_says_so(text: str, tokens: int) -> None:
    encoded = ids_of("qwen2_5", text)
    kept = template("qwen2_5").shortened(text, tokens)
    if len(encoded) <= tokens:
        assert kept == text
        return
    beginning, mark = kept.rsplit(" [truncated: the first ", 1)
    assert text.startswith(beginning) and len(beginning) <= len(text)
    assert mark == f"{tokens} of {len(encoded)} tokens]"
