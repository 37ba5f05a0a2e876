"""Prompts of data rows in the shapes of Hugging Face and OpenAI: rendered as their conventions have it, or refused with row and field."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.pipeline.data.open import open_dataset
from penstock.pipeline.data.read_files import DataError, Fields, make_row
from penstock.pipeline.data.tokenization import Renderer
from tests.support.any_text import ANY_TEXT
from tests.support.light_model import light_model

CALLS = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<s>{{ m.role }}:{{ m.content }}"
    "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}</s>{% endfor %}{% if add_generation_prompt %}<s>assistant:{% endif %}"
)
STRICT = (
    "{% for m in messages %}{% if m.role not in ('system', 'user', 'assistant', 'tool') %}{{ raise_exception('no role ' + m.role) }}"
    "{% endif %}{{ m.role }}:{{ m.content | trim }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
WEATHER = {"type": "function", "function": {"name": "weather", "description": "d", "parameters": {"type": "object", "properties": {}}}}
USER = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: light_model(folder / name, template=source) for name, source in (("calls", CALLS), ("strict", STRICT), ("none", None))}


def rendered(folder: Path, prompt: Any, **columns: Any) -> str:
    row = make_row({"prompt": prompt, **columns}, index=0, origin="rows.jsonl:3", fields=Fields(answer=""))
    return Renderer(folder, max_prompt_tokens=100_000).render(row)[0]


def called(arguments: Any, **message: Any) -> list[dict[str, Any]]:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [USER, {"role": "assistant", "tool_calls": [call], **message}, {"role": "tool", "tool_call_id": "c1", "content": "1"}]


@pytest.mark.parametrize("begun", ["so: ef", "<think>", "so \n", "a</s", "", "so", "é\n\nworld"])
@pytest.mark.parametrize("name", ["calls", "strict"])
def test_a_prompt_that_ends_with_the_assistant_is_continued(folders: Mapping[str, Path], name: str, begun: str) -> None:
    text = rendered(folders[name], [USER, {"role": "assistant", "content": begun}])
    assert text == ("<s>user:hi</s><s>assistant:" if name == "calls" else "user:hi\nassistant:") + begun


def test_what_cannot_be_continued_is_refused_with_its_row(folders: Mapping[str, Path], tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"^rows.jsonl:3: the last message calls a tool, but no tool message with the result follows$"):
        rendered(folders["calls"], called({})[:2])
    deaf = light_model(tmp_path / "deaf", template="{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}")
    with pytest.raises(DataError, match=r"^rows.jsonl:3: the chat template omits the last message"):
        rendered(deaf, [USER, {"role": "assistant", "content": "so"}])


@pytest.mark.parametrize("arguments", [{"city": "a", "day": None}, '{"city": "a"}', {"city": "a", "in": {"x": None}}])
@pytest.mark.parametrize("message", [{}, {"content": None}, {"content": ""}])
def test_calls_of_tools_have_arguments_as_objects_and_no_nulls(folders: Mapping[str, Path], arguments: Any, message: Any) -> None:
    text = rendered(folders["calls"], called(arguments, **message))
    assert '"arguments": {"city": "a"' in text
    assert "null" not in text
    assert "None" not in text


def test_a_template_that_wants_arguments_as_text_gets_text(tmp_path: Path) -> None:
    calls = "{% for c in m.tool_calls or [] %}{{ c.function.name + c.function.arguments }}{% endfor %}"
    source = "{% for m in messages %}{{ m.content }}" + calls + "{% endfor %}"
    folder = light_model(tmp_path / "m", template=source)
    for arguments in ({"x": 1}, '{"x": 1}'):
        assert rendered(folder, called(arguments)) == 'hif{"x": 1}1'


def test_nulls_that_arrow_adds_to_messages_calls_and_tools_are_taken_out(folders: Mapping[str, Path], tmp_path: Path) -> None:
    tools = [{**WEATHER, "function": {**WEATHER["function"], "parameters": {"properties": {"city": {"type": "string"}}}}}]
    others = [{**WEATHER, "function": {**WEATHER["function"], "parameters": {"properties": {"day": {"enum": ["a"]}}}}}]
    rows = [
        {"prompt": called({"city": "a"}), "tools": tools},
        {"prompt": [*called({"day": 3})[:2], {"role": "tool", "name": "f", "content": "1"}], "tools": others},
        {"prompt": [USER], "tools": None},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    for index, row in enumerate(open_dataset("rows.parquet", base_dir=tmp_path, answer_field="")):
        text, _ = Renderer(folders["calls"], max_prompt_tokens=10_000).render(row)
        assert text == rendered(folders["calls"], rows[index]["prompt"], tools=rows[index]["tools"])
        assert "null" not in text


@pytest.mark.parametrize(
    "tools", [[WEATHER], json.dumps([WEATHER]), json.dumps(WEATHER), [json.dumps(WEATHER)], WEATHER, [WEATHER["function"]]]
)
def test_the_tools_of_a_row_reach_the_template(folders: Mapping[str, Path], tools: Any) -> None:
    assert '"name": "weather"' in rendered(folders["calls"], [USER], tools=tools)


@pytest.mark.parametrize("tools", [None, [], "", " ", "[]", "null"])
def test_a_row_without_tools_is_rendered_without(folders: Mapping[str, Path], tools: Any) -> None:
    assert rendered(folders["calls"], [USER], tools=tools) == "<s>user:hi</s><s>assistant:"


@pytest.mark.parametrize("tools", ["hammer, saw", ["hammer"], [{"name": 1}], 7, [None], {"a": 1}])
def test_a_column_of_other_tools_is_refused_with_row_and_field(folders: Mapping[str, Path], tools: Any) -> None:
    with pytest.raises(DataError, match=r"^rows.jsonl:3: field 'tools': .*; expected a list of tools, or rename the column$"):
        rendered(folders["calls"], [USER], tools=tools)


def test_what_is_nested_too_deeply_is_refused_with_row_and_field(folders: Mapping[str, Path]) -> None:
    deep: dict[str, Any] = {}
    for _ in range(3000):
        deep = {"a": deep}
    with pytest.raises(DataError, match=r"^rows.jsonl:3: field 'prompt' contains values nested too deeply"):
        rendered(folders["calls"], [{**USER, "extra": deep}])
    for tools in ([{**WEATHER, "parameters": deep}], "[" * 100_000):
        with pytest.raises(DataError, match=r"^rows.jsonl:3: field 'tools'"):
            rendered(folders["calls"], [USER], tools=tools)


def test_tools_are_described_to_a_model_whose_template_has_none(folders: Mapping[str, Path]) -> None:
    assert '"name": "weather"' in rendered(folders["strict"], [USER], tools=[WEATHER])


@pytest.mark.parametrize(
    "content",
    ["hi", [{"type": "text", "text": "hi"}], [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}], ["h", "i"],
     [{"type": "input_text", "text": "hi"}], [{"type": "text", "text": "hi", "image_url": None}]],
)  # fmt: skip
def test_parts_of_text_are_text(folders: Mapping[str, Path], content: Any) -> None:
    assert rendered(folders["calls"], [{"role": "user", "content": content}]) == "<s>user:hi</s><s>assistant:"


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], "message 1 has a part of type 'image_url' in 'content'"),
        ([USER, {"role": "user", "content": None}], "message 2: 'content' is neither a string nor"),
        ([USER, {"role": None, "content": "x"}], "message 2: 'role' is not a string"),
        ([USER, "hi"], "message 2: 'role' is not a string"),
        ([{"role": "user", "content": 7}], "message 1: 'content' is neither a string nor"),
        ([{"role": "user", "content": " "}], "all messages are empty"),
    ],
)
def test_a_message_that_is_none_is_refused_with_its_number(folders: Mapping[str, Path], messages: Any, words: str) -> None:
    with pytest.raises(DataError, match=f"^rows.jsonl:3: field 'prompt': {words}"):
        rendered(folders["calls"], messages)


CONTENTS = st.one_of(
    st.none(), ANY_TEXT, st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": ANY_TEXT}), max_size=2), st.integers()
)
FUNCTIONS = st.fixed_dictionaries({"name": ANY_TEXT, "arguments": st.none() | ANY_TEXT | st.dictionaries(ANY_TEXT, CONTENTS)})
MESSAGES = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "developer", "user", "assistant", "tool", "critic"]), "content": CONTENTS},
    optional={
        "name": ANY_TEXT,
        "reasoning_content": ANY_TEXT,
        "weight": st.none() | st.integers(),
        "tool_calls": st.none() | st.lists(st.fixed_dictionaries({"function": FUNCTIONS}), max_size=2),
    },
)


@pytest.mark.parametrize("name", ["calls", "strict"])
@given(messages=st.lists(MESSAGES, max_size=4), tools=st.none() | st.just([WEATHER]) | ANY_TEXT)
@settings(max_examples=40)
def test_any_conversation_is_rendered_or_refused_in_one_line_with_its_row(
    folders: Mapping[str, Path], name: str, messages: Any, tools: Any
) -> None:
    refused = None
    try:
        rendered(folders[name], messages, tools=tools).encode()
    except DataError as error:
        refused = str(error)
    assert refused is None or (refused.startswith("rows.jsonl:3: ") and "\n" not in refused)


def test_a_prompt_that_was_rendered_beforehand_has_one_begin_token(tmp_path: Path) -> None:
    folder = light_model(tmp_path / "m")
    file = json.loads((folder / "tokenizer.json").read_text())
    file["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [256], "tokens": ["<s>"]}},
    }
    (folder / "tokenizer.json").write_text(json.dumps(file))
    for prompt in ("hi", "<s>hi"):
        row = make_row({"prompt": prompt}, index=0, origin="rows.jsonl:3", fields=Fields(answer=""))
        assert Renderer(folder).render(row)[1].tolist().count(256) == 1
    for template in ("{{ '<s>' + messages[0].content }}", "{{ bos_token }}{{ messages[0].content }}"):
        (folder / "chat_template.jinja").write_text(template)
        (folder / "special_tokens_map.json").write_text(json.dumps({"bos_token": {"content": "<s>"}}))
        for prompt in ("hi", "<s>hi"):
            row = make_row({"prompt": prompt}, index=0, origin="rows.jsonl:3", fields=Fields(answer=""))
            assert Renderer(folder).render(row)[1].tolist().count(256) == 1
