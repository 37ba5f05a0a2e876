"""Calls of tools as models write them: each format is read, and what cannot be read is told to the model and never raised."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.pipeline.data.conversation.parsers import FORMATS, format_of, read_calls
from tests.support.chat_families import FAMILIES, source

WRITTEN = {
    "hermes": [
        'Sure. <tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "x"}}\n</tool_call>',
        'Sure. <tool_call>[{"name": "add", "arguments": {"a": 1, "b": "x"}}]</tool_call>',
        'Sure. <tool_call>{"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": \\"x\\"}"}</tool_call>',
        "Sure. <tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\nx\n</parameter>\n</function>\n</tool_call>",
    ],
    "llama3": [
        '{"name": "add", "parameters": {"a": 1, "b": "x"}}',
        '<|python_tag|>{"type": "function", "name": "add", "parameters": {"a": 1, "b": "x"}}',
    ],
    "mistral": [
        'Sure. [TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": "x"}, "id": "abcdefghi"}]',
        'Sure. [TOOL_CALLS]add{"a": 1, "b": "x"}',
        'Sure. [TOOL_CALLS]add[ARGS]{"a": 1, "b": "x"}',
    ],
    "pythonic": ['[add(a=1, b="x")]', 'Sure. <|tool_call_start|>[add(a=1, b="x")]<|tool_call_end|>'],
    "harmony": [
        'Sure. <|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1, "b": "x"}<|call|>',
        'Sure. <|start|>assistant to=functions.add<|channel|>commentary <|constrain|>json<|message|>{"a": 1, "b": "x"}',
    ],
    "deepseek": [
        'Sure. <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{"a": 1, "b": "x"}\n```'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        'Sure. <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n{"a": 1, "b": "x"}',
    ],
    "phi4": [
        'Sure. functools[{"name": "add", "arguments": {"a": 1, "b": "x"}}]',
        'Sure. <|tool_call|>[{"name": "add", "arguments": {"a": 1, "b": "x"}}]<|/tool_call|>',
    ],
}
MALFORMED = {
    "hermes": [
        '<tool_call>{"name": "add", "arguments": {"a": 1}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "add", "argum',
        "<tool_call><function=add<parameter=a>1</tool_call>",
        "<tool_call>" + "[" * 100_000 + "</tool_call>",
    ],
    "llama3": ['{"name": "add", "parameters": {"a": }}', '{"name": 7}'],
    "mistral": ["[TOOL_CALLS] [{'name': 'add'}]", "[TOOL_CALLS]add(1)"],
    "pythonic": [
        "<|tool_call_start|>[add(1)]<|tool_call_end|>",
        "[add(a=open('x'))]",
        "[add(a=1)",
        "<|tool_call_start|>[add.b]<|tool_call_end|>",
    ],
    "harmony": ["<|channel|>commentary to=functions.add<|message|>{a}<|call|>"],
    "deepseek": ["<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\nno\n```<｜tool▁call▁end｜>"],
    "phi4": ['<|tool_call|>{"name": add}<|/tool_call|>'],
}


PIECES = [
    *("<tool_call>", "</tool_call>", "<function=f>", "[TOOL_CALLS]", "[ARGS]", "<|tool_call_start|>", "<|tool_call|>", "functools"),
    *("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "to=functions.f", "<|message|>", "<|call|>", "<|python_tag|>", "[f(", ")]"),
    *('{"name": "f"', ', "arguments": ', "{}", "}", "[", "]", '"', "\n", "\x00", "é", "1e999", "null", "f"),
]


@pytest.mark.parametrize(("form", "text"), [(form, text) for form, texts in WRITTEN.items() for text in texts])
def test_a_call_is_read_as_its_models_write_it(form: str, text: str) -> None:
    content, calls, malformed = read_calls(text, form, start=12)
    assert malformed == []
    (call,) = calls
    assert (call["id"], call["type"], call["function"]["name"]) == ("call00012", "function", "add")
    assert json.loads(call["function"]["arguments"]) == {"a": 1, "b": "x"}
    assert content == ("Sure." if text.startswith("Sure.") else "")


@pytest.mark.parametrize(("form", "text"), [(form, text) for form, texts in MALFORMED.items() for text in texts])
def test_a_call_that_cannot_be_read_stays_in_the_content_and_a_line_says_what_is_wrong(form: str, text: str) -> None:
    content, calls, (line,) = read_calls(text, form)
    assert (content, calls) == (text, [])
    assert line.startswith("Tool call 1 cannot be read: ") and "\n" not in line and len(line) < 400


def test_a_readable_call_beside_an_unreadable_one_is_made() -> None:
    text = '<tool_call>{"name": }</tool_call><tool_call>{"name": "add"}</tool_call>'
    content, calls, malformed = read_calls(text, "hermes")
    assert content == '<tool_call>{"name": }</tool_call>'
    assert [call["function"] for call in calls] == [{"name": "add", "arguments": "{}"}]
    assert len(malformed) == 1


def test_several_calls_are_numbered() -> None:
    _, calls, _ = read_calls('{"name": "add", "parameters": {"a": 1}}; {"name": "sub", "parameters": {}}', "llama3")
    assert [(call["id"], call["function"]["name"]) for call in calls] == [("call00000", "add"), ("call00001", "sub")]


@pytest.mark.parametrize("form", sorted(FORMATS))
def test_text_without_a_call_is_content(form: str) -> None:
    for text in ("It is seven.", "  [1, 2]", "{}", '{"answer": 7}', "a < b", ""):
        assert read_calls(text, form) == (text, [], [])


@pytest.mark.parametrize("form", sorted(FORMATS))
@given(st.lists(st.sampled_from(PIECES), max_size=12).map("".join))
def test_nothing_that_a_model_writes_raises(form: str, text: str) -> None:
    content, calls, malformed = read_calls(text, form)
    assert isinstance(content, str)
    assert all(isinstance(json.loads(call["function"]["arguments"]), dict) for call in calls)
    assert all("\n" not in line for line in malformed)


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_the_format_shows_in_the_template_where_it_takes_tools(name: str) -> None:
    if name not in ("gemma", "smollm2", "hostile"):
        assert format_of(source(name)) == FAMILIES[name].tool_format
