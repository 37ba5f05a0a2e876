"""Ten model families: no token drifts, segments begin where they have to and only there, and the mask is on the policy's tokens only."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.pipeline.data.conversation.messages import TemplateRefused
from penstock.pipeline.data.conversation.segments import Context, Conversation, Segment
from tests.support.chat_families import FAMILIES, answer, ids_of, source, stop_ids, template, tokenizer, version_of

ADD = {
    "type": "function",
    "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
NAMES = sorted(FAMILIES)
WORDS = st.text("abc xyz?!.{}\n\"<'é世", min_size=1, max_size=12).filter(lambda text: text.strip() == text)
THINKS = sorted(name for name in NAMES if FAMILIES[name].strips_thinking)


class Talk:
    """A conversation as an agent leads it, with all that its engine was asked and drew."""

    def __init__(self, name: str, *, tools: bool = False, history: Any = "exact") -> None:
        self.name, self.tools = name, [ADD] if tools else None
        self.conversation = Conversation(template(name), self.tools, history=history)
        self.messages: list[dict[str, Any]] = [{"role": "user", "content": "What is 3 + 4?"}]
        self.asked: list[tuple[Context, list[int]]] = []

    def ask(self) -> Context:
        return self.conversation.context(self.messages)

    def draw(self, ids: list[int], finish: Any = "stop") -> dict[str, Any]:
        context = self.ask()
        logprobs = [-1.0 / (context.number + 1)] * len(ids)
        said = self.conversation.add_completion(context, ids, logprobs, version_of(context.number, ids), finish)
        self.messages.append(said.message)
        self.asked.append((context, ids))
        return said.message

    def hear(self, text: str, role: str = "user") -> None:
        self.messages.append({"role": role, "content": text})

    def call(self) -> dict[str, Any]:
        message = self.draw(answer(self.name, FAMILIES[self.name].call, stop=-1 if self.name == "gpt_oss" else 0))
        self.messages += [{"role": "tool", "tool_call_id": call["id"], "content": "7"} for call in message["tool_calls"]]
        return message


def text(name: str, ids: Any) -> str:
    return str(tokenizer(name).decode(list(map(int, ids)), skip_special_tokens=False))


def check_truth(talk: Talk) -> tuple[Segment, ...]:
    """What holds for every trajectory: each drawn token is trained once, after exactly what its engine was given."""
    segments = talk.conversation.segments()
    trained: dict[int, list[int]] = {}
    for segment in segments:
        ends = [part.end for part in segment.parts]
        assert [part.start for part in segment.parts] == [0, *ends[:-1]] and ends[-1] == len(segment.token_ids)
        for part in segment.parts:
            own = slice(part.start, part.end)
            assert segment.mask[own].all() if part.source == "model" else not segment.mask[own].any()
            if part.source == "model":
                context, ids = talk.asked[[context.number for context, _ in talk.asked].index(part.turn)]
                assert segment.token_ids[: part.start].tolist() == context.token_ids.tolist()
                assert segment.versions[own].tolist() == version_of(part.turn, ids)
                trained.setdefault(part.turn, []).extend(segment.token_ids[own].tolist())
            else:
                assert (segment.versions[own] == segment.versions[part.end]).all()
        assert (np.isnan(segment.logprobs) == ~segment.mask).all()
    assert trained == {context.number: ids for context, ids in talk.asked if ids}
    return segments


@st.composite
def drawn_ids(draw: Any, name: str) -> list[int]:
    """What an engine may draw: any ids of the vocabulary that are no added tokens, and the family's stop token."""
    words = st.integers(0, tokenizer(name).get_vocab_size(with_added_tokens=False) - 1)
    added = tokenizer(name).get_added_tokens_decoder()
    return [i for i in draw(st.lists(words, max_size=8)) if i not in added] + stop_ids(name)[:1]


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
@settings(max_examples=15)
def test_whatever_is_drawn_and_said_every_drawn_token_is_trained_once_after_what_the_engine_was_given(name: str, data: Any) -> None:
    talk = Talk(name, history=data.draw(st.sampled_from(["exact", "template"])))
    for _ in range(data.draw(st.integers(1, 4))):
        talk.draw(data.draw(drawn_ids(name)), data.draw(st.sampled_from(["stop", "length"])))
        if data.draw(st.booleans()):  # the agent edits what was said before
            edited = data.draw(st.integers(0, len(talk.messages) - 1))
            talk.messages[edited] = {**talk.messages[edited], "content": data.draw(WORDS)}
        talk.hear(data.draw(WORDS))
    check_truth(talk)


@pytest.mark.parametrize("name", [name for name in NAMES if FAMILIES[name].appends])
@given(data=st.data())
@settings(max_examples=15)
def test_a_conversation_that_only_grows_is_one_segment_and_what_is_added_is_what_the_template_writes(name: str, data: Any) -> None:
    talk = Talk(name)
    # The hostile template leaves out the end of an answer before a question.
    words = WORDS.filter(lambda text: not text.endswith("?")) if name == "hostile" else WORDS
    for _ in range(data.draw(st.integers(1, 4))):
        talk.draw(data.draw(drawn_ids(name)))
        talk.hear(data.draw(words))
        context = talk.ask()
        assert context.prefix_tokens == sum(len(ids) for ids in (talk.asked[-1][0].token_ids, talk.asked[-1][1]))
        whole = text(name, template(name).render(talk.messages, None))
        assert whole.endswith(text(name, context.token_ids[context.prefix_tokens :]))
        assert talk.messages[-1]["content"] in text(name, context.token_ids[context.prefix_tokens :])
    talk.draw(data.draw(drawn_ids(name)))
    assert len(check_truth(talk)) == 1


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "llama3", "smollm2", "gemma", "phi", "hostile"])
@given(questions=st.lists(WORDS.filter(lambda text: not text.endswith("?") and len(text) > 2), min_size=1, max_size=4))
@settings(max_examples=15)
def test_where_the_engine_draws_what_a_tokenizer_would_write_the_ids_are_those_of_the_whole_rendering(
    name: str, questions: list[str]
) -> None:
    talk = Talk(name)
    for question in questions:
        talk.draw([*ids_of(name, "It is seven."), stop_ids(name)[0]])
        talk.hear(question)
        assert text(name, talk.ask().token_ids) == text(name, template(name).render(talk.messages, None))


@pytest.mark.parametrize("name", NAMES)
def test_calls_of_tools_and_their_results_go_on_in_one_segment(name: str) -> None:
    talk = Talk(name, tools=True)
    for turn in range(3):
        message = talk.call()
        assert [call["function"] for call in message["tool_calls"]] == [{"name": "add", "arguments": '{"a": 1}'}]
        assert message["tool_calls"][0]["id"] == f"call{turn:05d}"
    talk.draw(answer(name, "It is seven."))
    segment, *others = check_truth(talk)
    assert not others
    assert [part.source for part in segment.parts] == ["prompt", "model", "tool", "model", "tool", "model", "tool", "model"]


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "smollm2", "mistral", "phi", "gemma", "hostile", "deepseek_r1"])
def test_two_results_of_tools_follow_one_answer(name: str) -> None:
    talk = Talk(name, tools=True)
    call = FAMILIES[name].call
    doubled = (
        call.replace("}}]", '}}, {"name": "add", "arguments": {"a": 2}}]')
        if "}}]" in call
        else call + call.removeprefix("So be it.\n</think>\n\n")
    )
    message = talk.draw(answer(name, doubled))
    assert len(message["tool_calls"]) == 2
    talk.messages += [{"role": "tool", "tool_call_id": call["id"], "content": f"result {call['id']}"} for call in message["tool_calls"]]
    context = talk.ask()
    added = text(name, context.token_ids[context.prefix_tokens :])
    assert context.prefix_tokens and all(f"result call0000{number}" in added for number in (0, 1))


@pytest.mark.parametrize("name", THINKS)
def test_thinking_stays_in_an_exact_history_and_begins_a_segment_where_the_template_strips_it(name: str) -> None:
    thought = {
        "qwen3": "<think>\nHm.\n</think>\n\nSeven.",
        "deepseek_r1": "Hm.\n</think>\n\nSeven.",
        "gpt_oss": "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Seven.",
    }[name]
    counts = {}
    for history in ("exact", "template"):
        talk = Talk(name, history=history)
        for _ in range(3):
            message = talk.draw(answer(name, thought))
            assert (message["content"], message["reasoning_content"]) == ("Seven.", "Hm.")
            message.pop("reasoning_content")  # as clients do
            talk.hear("Sure.")
        counts[history] = len(check_truth(talk))
    # gpt-oss exchanges the token that ends an answer once it is history, in either.
    assert counts == {"exact": 3 if name == "gpt_oss" else 1, "template": 3}


@pytest.mark.parametrize("name", [name for name in NAMES if FAMILIES[name].appends and name not in THINKS])
def test_a_history_rendered_by_the_template_is_one_segment_if_the_engine_draws_what_the_template_writes(name: str) -> None:
    talk, other = Talk(name, history="template"), Talk(name, history="template")
    before = " " if name == "mistral" else ""
    for _ in range(3):
        talk.draw([*ids_of(name, f"{before}It is seven."), stop_ids(name)[0]])
        # Letter by letter: the template's rendering is tokenised otherwise.
        other.draw([i for letter in f"{before}It is seven." for i in ids_of(name, letter)] + stop_ids(name)[:1])
        for each in (talk, other):
            each.hear("Sure.")
    assert len(check_truth(talk)) == 1
    assert len(check_truth(other)) == 3


@pytest.mark.parametrize("name", NAMES)
def test_an_answer_cut_at_its_limit_is_closed_by_the_template_and_goes_on(name: str) -> None:
    talk = Talk(name)
    talk.draw(answer(name, "It is se")[:-1], "length")
    talk.hear("Go on.")
    context = talk.ask()
    if FAMILIES[name].appends:
        assert context.prefix_tokens and any(stop in context.token_ids[context.prefix_tokens :] for stop in stop_ids(name))
    talk.draw(answer(name, "ven."))
    assert len(check_truth(talk)) == (1 if FAMILIES[name].appends else 2)


@pytest.mark.parametrize("name", [name for name in NAMES if len(FAMILIES[name].stops) > 1 and FAMILIES[name].appends])
def test_another_stop_token_than_the_templates_begins_a_segment(name: str) -> None:
    talk = Talk(name)
    talk.draw(answer(name, "It is seven.", stop=1))
    talk.hear("Sure.")
    assert talk.ask().prefix_tokens == 0
    talk.draw(answer(name, "Yes."))
    assert len(check_truth(talk)) == 2


@pytest.mark.parametrize("name", NAMES)
def test_an_edited_history_begins_a_segment_and_a_return_to_the_old_one_goes_on_with_it(name: str) -> None:
    talk = Talk(name, tools=True)
    talk.call()
    kept = list(talk.messages)
    talk.messages = [{"role": "user", "content": "In short: the tool says 7. What now?"}]
    talk.draw(answer(name, "Stop."))
    talk.messages = kept
    talk.draw(answer(name, "It is seven."))
    first, second = check_truth(talk)
    assert [part.turn for part in first.parts if part.source == "model"] == [0, 2]
    assert [part.turn for part in second.parts if part.source == "model"] == [1]


def test_what_the_hostile_template_moves_to_the_front_is_not_lost() -> None:
    talk = Talk("hostile")
    talk.draw(answer("hostile", "It is seven."))
    talk.hear("Be brief.", role="system")
    talk.hear("Sure.")
    context = talk.ask()
    assert context.prefix_tokens == 0
    assert text("hostile", context.token_ids).startswith("<bos><rules>Be brief.</rules>")


def test_where_the_hostile_template_writes_no_end_of_turn_the_question_is_not_lost() -> None:
    talk = Talk("hostile")
    talk.draw(answer("hostile", "It is seven."))
    talk.hear("Is it so?")
    talk.hear("ok")  # followed by a stop token, behind the question
    context = talk.ask()
    assert context.prefix_tokens == 0
    assert "Is it so?" in text("hostile", context.token_ids)


@pytest.mark.costly  # imports transformers
@pytest.mark.parametrize("name", NAMES)
def test_the_text_of_a_template_is_what_transformers_renders(name: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    special = FAMILIES[name].special
    messages = [
        {"role": "system", "content": "Short."},
        {"role": "user", "content": "<b>é</b> & 'x'"},
        {"role": "assistant", "content": "Hm."},
    ]
    messages.append({"role": "user", "content": "And?"})
    rendered, _ = render_jinja_template(
        conversations=[messages],
        tools=None,
        chat_template=source(name),
        add_generation_prompt=True,
        bos_token=special[0],
        eos_token=FAMILIES[name].stops[0],
    )
    assert template(name).render(messages, None) == ids_of(name, rendered[0])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "begun", ["<think>\nx\n</think>\n\nThe", "<think>x</think>The", "x</think>y", "</think>", "so: ", "<think>\n", " so", ""]
)
def test_a_begun_answer_is_continued_as_it_is_or_refused(name: str, begun: str) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": begun}]
    changes = {"deepseek_r1": "</think>" in begun, "qwen3": "</think>" in begun and "\n</think>\n\n" not in begun}
    if changes.get(name):
        with pytest.raises(TemplateRefused, match="the chat template changes the last message, which the policy should continue"):
            template(name).rendered(messages, None)
    else:
        assert template(name).rendered(messages, None)[0].endswith(begun.lstrip())
