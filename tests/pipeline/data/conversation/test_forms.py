"""Messages reach each template in the form that it reads; nothing is dropped without a word."""

import pytest

from penstock.infra.errors import ConfigError
from penstock.pipeline.data.conversation.messages import TemplateRefused
from penstock.pipeline.data.conversation.template import ChatTemplate, PlainTemplate
from tests.support.chat_families import ids_of, stop_ids, template, tokenizer
from tests.support.refusals import one_line

USER = {"role": "user", "content": "What is 3 + 4?"}
CALL = {"id": "call00000", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
CALLED = [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "tool", "tool_call_id": "call00000", "content": "7"}]
ADD = [{"type": "function", "function": {"name": "add", "description": "", "parameters": {"type": "object", "properties": {}}}}]


def rendered(source: str, messages, tools=None) -> str:
    made = ChatTemplate(tokenizer("qwen2_5"), source, stop_ids=stop_ids("qwen2_5"))
    return tokenizer("qwen2_5").decode(made.render(messages, tools), skip_special_tokens=False)


def test_a_template_of_a_model_with_vision_gets_its_texts_as_parts() -> None:
    source = "{% for m in messages %}{{ m.role }}: {% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}"
    assert rendered(source, [USER]) == "user: What is 3 + 4?"


def test_text_in_parts_is_one_text_for_other_templates() -> None:
    parts = {"role": "user", "content": [{"type": "text", "text": "What is "}, {"type": "text", "text": "3 + 4?"}]}
    assert rendered("{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}", [parts]) == "user: What is 3 + 4?"


@pytest.mark.parametrize("key", ["name", "reasoning_content", "tool_call_id", "refusal", "audio", "function_call", "annotations"])
def test_a_field_that_a_client_sends_as_null_is_not_there_for_the_template(key: str) -> None:
    source = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% if '" + key + "' in m %}{{ m." + key + " }}{% endif %};{% endfor %}"
    messages = [USER, {"role": "assistant", "content": "7", key: None}, {"role": "user", key: None, "content": "Sure?"}]
    assert rendered(source, messages) == "user: What is 3 + 4?;assistant: 7;user: Sure?;"


@pytest.mark.parametrize(
    ("content", "arguments"),
    [
        ("{{ m.content }}", "{{ call.function.arguments | tojson }}"),
        ("{{ m.content + '' }}", "{{ call.function.arguments | tojson }}"),
        ("{% if m.content is none %}", "{{ '' + call.function.arguments }}{% endif %}"),
    ],
    ids=["prints None", "concatenates content", "only without content, concatenates arguments"],
)
def test_a_call_is_shown_however_a_template_reads_it(content: str, arguments: str) -> None:
    calls = "{% for call in m.tool_calls %}{{ call.function.name }}" + arguments + "{% endfor %}"
    if content.startswith("{% if"):
        calls = calls.replace("{% endif %}", "") + "{% endif %}"
    source = (
        "{{ tools | length }}{% for m in messages %}|{% if m.tool_calls %}"
        + content
        + calls
        + "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    assert rendered(source, CALLED, ADD) == '1|What is 3 + 4?|add{"a": 1}|7'


def test_a_template_that_never_shows_a_call_gets_it_as_text() -> None:
    source = "{{ tools }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    text = rendered(source, CALLED, ADD)
    assert '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>' in text
    assert "user: <tool_response>\n7\n</tool_response>\n" in text


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "neither a string nor a list of text parts"),
        ([{"content": "x"}], 'a message has no "role"'),
        ([{"role": "assistant", "content": "", "tool_calls": [{"id": "x"}]}], "a tool call has no"),
        ([USER, USER], "roles must alternate"),
    ],
)
def test_messages_that_cannot_be_rendered_are_refused_with_a_line(messages, reason: str) -> None:
    with one_line(TemplateRefused, match=reason):
        template("gemma").render(messages, None)


@pytest.mark.parametrize(("name", "calls"), [("llama3", 1), ("qwen2_5", 2)])
def test_a_second_call_in_a_turn_is_refused_as_the_policys_fault_where_the_template_takes_one(name: str, calls: int) -> None:
    two = '{"name": "add", "parameters": {"a": 1}}; {"name": "sub", "parameters": {}}'
    if name != "llama3":
        two = "".join(f"<tool_call>{call}</tool_call>" for call in two.split("; "))
    said = template(name).parse([*ids_of(name, two), stop_ids(name)[0]], [], ADD, 0)
    assert [call["function"]["name"] for call in said.message["tool_calls"]] == ["add", "sub"][:calls]
    refused = ("The call of sub was not run, because a turn may contain only one tool call. Repeat it in a separate turn.",)
    assert said.malformed == (refused if calls == 1 else ())
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "7"} for call in said.message["tool_calls"]]
    assert template(name).bridge([USER, said.message, *results], 2, ADD, stop_ids(name)[0])


def test_the_policys_tool_calls_have_no_surrogates() -> None:
    written = '<tool_call>\n{"name": "add", "arguments": {"a": "\\ud83d"}}\n</tool_call>'
    (call,) = template("qwen2_5").parse(ids_of("qwen2_5", written), [], ADD, 0).message["tool_calls"]
    assert call["function"]["arguments"] == '{"a": "\ufffd"}'


def test_without_a_chat_template_texts_follow_each_other_and_a_cut_answer_is_closed() -> None:
    stop, *_ = stop_ids("qwen2_5")
    plain = PlainTemplate(tokenizer("qwen2_5"), stop_ids("qwen2_5"), lambda text: ids_of("qwen2_5", text))
    said = [{"role": "user", "content": "DR00:"}, {"role": "assistant", "content": "D"}, {"role": "user", "content": "LD10:"}]
    assert plain.render(said, None) == [*ids_of("qwen2_5", "DR00:"), *ids_of("qwen2_5", "D"), stop, *ids_of("qwen2_5", "LD10:")]
    assert plain.render(said[:2], None) == [*ids_of("qwen2_5", "DR00:"), *ids_of("qwen2_5", "D")]  # an answer that was begun is continued
    assert plain.bridge(said, 2, None, stop) == ids_of("qwen2_5", "LD10:")
    assert plain.bridge(said, 2, None, 65) == [stop, *ids_of("qwen2_5", "LD10:")]
    assert plain.parse([*ids_of("qwen2_5", "D"), stop], [], None, 0).message == {"role": "assistant", "content": "D"}
    with pytest.raises(TemplateRefused, match="tools need a chat template"):
        plain.render(said, ADD)


def test_a_template_that_does_not_compile_names_the_setting() -> None:
    with pytest.raises(ConfigError, match=r"data\.chat_template: .*xpected"):
        ChatTemplate(tokenizer("qwen2_5"), "{% for %}", stop_ids=[0])
