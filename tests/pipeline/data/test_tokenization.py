"""Rendering: a prompt is tokenised once, and whoever means other tokens has other digests."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.infra.errors import ConfigError
from penstock.pipeline.data.read_files import DataError, Row
from penstock.pipeline.data.tokenization import Decoder, Renderer, digests
from tests.support.light_model import light_model as model
from tests.support.paths import ROOT

TEMPLATE = "{% for m in messages %}<s>{{ m.role }}:{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<s>assistant:{% endif %}"


def row(prompt: str | None = "2+2=", messages: list[dict[str, Any]] | None = None) -> Row:
    return Row(index=0, prompt=prompt, messages=messages, columns={"answer": "4"}, origin="train.jsonl:3")


def test_a_prompt_becomes_text_and_ids_that_decode_to_it(tmp_path: Path) -> None:
    folder = model(tmp_path / "m")
    text, ids = Renderer(folder).render(row("grüß Gott"))
    assert text == "grüß Gott"
    assert ids.dtype == np.int32
    assert Decoder(folder).decode(ids) == "grüß Gott"


def test_a_chat_template_is_applied_where_there_is_one_and_special_tokens_are_single_ids(tmp_path: Path) -> None:
    folder = model(tmp_path / "m", template=TEMPLATE)
    text, ids = Renderer(folder).render(row("hi"))
    assert text == "<s>user:hi</s><s>assistant:"
    assert list(ids).count(256) == 2
    assert list(ids).count(257) == 1
    talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    assert Renderer(folder).render(row(None, talk))[0].startswith("<s>system:Be brief.</s>")
    assert Renderer(folder, chat_template="off").render(row("hi"))[0] == "hi"
    own = tmp_path / "own.jinja"
    own.write_text("Q: {{ messages[0].content }}\nA:")
    assert Renderer(folder, chat_template=str(own)).render(row("hi"))[0] == "Q: hi\nA:"


THINKING = TEMPLATE + "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"


def test_the_template_gets_the_system_prompt_and_the_arguments_of_the_configuration(tmp_path: Path) -> None:
    folder = model(tmp_path / "m", template=THINKING)
    quiet = Renderer(folder, system_prompt="Be brief.", template_arguments={"enable_thinking": False})
    assert quiet.render(row("hi"))[0] == "<s>system:Be brief.</s><s>user:hi</s><s>assistant:<think></think>"
    talk = [{"role": "system", "content": "Be long."}, {"role": "user", "content": "hi"}]
    assert quiet.render(row(None, talk))[0].startswith("<s>system:Be long.</s><s>user:hi</s>")
    talk[0]["role"] = "developer"  # OpenAI's newer name of the system
    assert quiet.render(row(None, talk))[0].startswith("<s>system:Be long.</s><s>user:hi</s>")
    assert Renderer(folder).render(row("hi"))[0] == "<s>user:hi</s><s>assistant:"


@pytest.mark.parametrize("named", [list, dict])
@pytest.mark.parametrize("file", ["tokenizer_config.json", "chat_template.json"])
def test_of_several_templates_the_default_is_taken_and_none_without_it(tmp_path: Path, file: str, named: Any) -> None:
    def write(**templates: str) -> Path:
        value = templates if named is dict else [{"name": name, "template": template} for name, template in templates.items()]
        (folder / file).write_text(json.dumps({"chat_template": value}))
        return folder

    folder = model(tmp_path / "m")
    assert Renderer(write(rag="no", default=THINKING)).render(row("hi"))[0] == "<s>user:hi</s><s>assistant:"
    with pytest.raises(ConfigError, match="has the templates rag, tool_use, none named default; set it to a Jinja file"):
        Renderer(write(rag="no", tool_use=THINKING))


@pytest.mark.parametrize("settings", [{"system_prompt": "Be brief."}, {"template_arguments": {"enable_thinking": False}}])
def test_what_only_a_chat_template_can_take_is_refused_without_one(tmp_path: Path, settings: dict[str, Any]) -> None:
    said = rf"data.{next(iter(settings))}: only a chat template uses it, and there is none; set data.chat_template to a Jinja file"
    with pytest.raises(ConfigError, match=said):
        Renderer(model(tmp_path / "m"), **settings)


@pytest.mark.costly  # imports transformers
def test_plain_prompts_get_the_same_ids_with_and_without_transformers(tmp_path: Path) -> None:
    folder = model(tmp_path / "m")
    light = Renderer(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "add_bos_token": True}))
    full = Renderer(folder)
    for prompt in ("2+2=", "grüß 🙂", " a  b\n", "<s>x</s>"):
        assert light.render(row(prompt))[1].tolist() == full.render(row(prompt))[1].tolist()


def test_a_chat_template_gives_the_ids_that_transformers_gives(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = model(tmp_path / "m")
    template = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content | tojson }}{{ eos_token }}{% endfor %}"
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "bos_token": "<s>", "chat_template": template}))
    full = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    for prompt in ("2+2=", "grüß 🙂", " a  b\n"):
        said = [{"role": "user", "content": prompt}]
        expected = full.apply_chat_template(said, add_generation_prompt=True, tokenize=True, return_dict=False)
        assert Renderer(folder).render(row(prompt))[1].tolist() == list(expected)


def test_what_a_tokenizer_file_says_about_cutting_and_padding_is_not_applied_to_prompts(tmp_path: Path) -> None:
    folder = model(tmp_path / "m")
    expected = Renderer(folder).render(row("12345678"))[1].tolist()
    file = json.loads((folder / "tokenizer.json").read_text())
    file["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    (folder / "tokenizer.json").write_text(json.dumps(file))
    assert Renderer(folder).render(row("12345678"))[1].tolist() == expected


def test_the_decoder_leaves_special_tokens_out(tmp_path: Path) -> None:
    folder = model(tmp_path / "m")
    _, ids = Renderer(folder).render(row("42"))
    assert Decoder(folder).decode([*ids, 257]) == "42"


def test_a_prompt_that_cannot_be_rendered_is_named_with_its_place(tmp_path: Path) -> None:
    folder = model(tmp_path / "m")
    with pytest.raises(DataError, match=r"^train.jsonl:3: the prompt has 9 tokens, more than data.max_prompt_tokens = 8$"):
        Renderer(folder, max_prompt_tokens=8).render(row("123456789"))
    assert len(Renderer(folder, max_prompt_tokens=8).render(row("12345678"))[1]) == 8
    talk = [{"role": "user", "content": "hi"}]
    with pytest.raises(DataError, match=r"^train.jsonl:3: the prompt is a list of messages, but the model has no chat template"):
        Renderer(folder).render(row(None, talk))
    refusing = tmp_path / "refusing.jinja"
    refusing.write_text("{{ raise_exception('no system role') }}")
    with pytest.raises(DataError, match=r"^train.jsonl:3: the chat template rejects the messages: no system role"):
        Renderer(folder, chat_template=str(refusing)).render(row("hi"))


def test_what_a_model_directory_lacks_is_told_in_one_line(tmp_path: Path) -> None:
    for use in (Renderer, Decoder, digests):
        with pytest.raises(ValueError, match=r"model.path: there is no directory .*penstock model tiny"):
            use(tmp_path / "nowhere")
        with pytest.raises(ValueError, match=r"there is no directory .*: `penstock model lake .*/lake` makes it$"):
            use(tmp_path / "lake")
        (tmp_path / "empty").mkdir(exist_ok=True)
        with pytest.raises(ValueError, match=r"has no tokenizer.json: save one with"):
            use(tmp_path / "empty")
    folder = model(tmp_path / "m")
    with pytest.raises(ValueError, match=r"data.chat_template: on, but .* has no chat template"):
        Renderer(folder, chat_template="on")
    with pytest.raises(ValueError, match=r"data.chat_template: cannot read .*auot"):
        digests(folder, chat_template="auot")
    (folder / "tokenizer.json").write_text("{")
    for use in (Renderer, Decoder, digests):
        with pytest.raises(ValueError, match=r"model.path: .*tokenizer"):
            use(folder)


def test_digests_are_equal_for_a_copy_and_differ_for_another_tokenizer_or_template(tmp_path: Path) -> None:
    folder = model(tmp_path / "m", template=TEMPLATE)
    first = digests(folder)
    assert digests(shutil.copytree(folder, tmp_path / "copy")) == first
    (tmp_path / "copy/chat_template.jinja").write_text(TEMPLATE + " ")
    changed = digests(tmp_path / "copy")
    assert changed["template"] != first["template"]
    assert changed["tokenizer"] == first["tokenizer"]
    assert digests(folder, chat_template="off")["template"] not in (first["template"], changed["template"])
    (tmp_path / "copy/tokenizer.json").write_text((folder / "tokenizer.json").read_text().replace("<s>", "<t>"))
    assert digests(tmp_path / "copy")["tokenizer"] != first["tokenizer"]


def test_stop_ids_come_from_the_model_its_generation_config_and_its_tokenizer(tmp_path: Path) -> None:
    folder = model(tmp_path / "m")
    assert digests(folder)["stop_ids"] == [257]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 3]}))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": None, "text_config": {"eos_token_id": 5}}))
    assert digests(folder)["stop_ids"] == [3, 5, 9, 257]


@pytest.mark.parametrize(
    ("file", "key", "value", "expected"),
    [
        ("generation_config.json", "eos_token_id", "2", [2, 257]),
        ("generation_config.json", "eos_token_id", ["2", 3], [2, 3, 257]),
        ("generation_config.json", "eos_token_id", "<s>", [256, 257]),
        ("generation_config.json", "eos_token_id", ["<s>", "</s>"], [256, 257]),
        ("generation_config.json", "eos_token_id", {"content": "<s>"}, [256, 257]),
        ("generation_config.json", "eos_token_id", [], [257]),
        ("config.json", "eos_token_id", None, [257]),
        ("tokenizer_config.json", "eos_token", ["<s>", "</s>"], [256, 257]),
        ("tokenizer_config.json", "eos_token", {"content": "<s>", "special": True}, [256, 257]),
        ("tokenizer_config.json", "eos_token", 256, [256, 257]),
        ("special_tokens_map.json", "eos_token", "<s>", [257]),
    ],
)
def test_an_end_token_is_a_token_an_id_or_a_list_of_them(tmp_path: Path, file: str, key: str, value: Any, expected: list[int]) -> None:
    folder = model(tmp_path / "m")
    settings = json.loads((folder / file).read_text()) if (folder / file).is_file() else {}
    (folder / file).write_text(json.dumps({**settings, key: value}))
    assert digests(folder)["stop_ids"] == expected


@pytest.mark.parametrize("value", ["<end>", -1, True, 2.5, [7, "<end>"], {"a": 1}, 10**9, ""])
def test_an_end_token_that_the_model_does_not_have_is_named_with_file_and_key(tmp_path: Path, value: Any) -> None:
    folder = model(tmp_path / "m")
    (folder / "config.json").write_text(json.dumps({"vocab_size": 258}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    said = r"^model.path: .*/generation_config.json: eos_token_id is .*, which is not a token of the model; expec"
    with pytest.raises(ConfigError, match=said):
        digests(folder)


@pytest.mark.parametrize(
    ("file", "settings"),
    [
        ("special_tokens_map.json", {"additional_special_tokens": ["A"]}),
        ("tokenizer_config.json", {"extra_special_tokens": {"image_token": "A"}}),
        ("tokenizer_config.json", {"pad_token": {"content": "A"}}),
        ("special_tokens_map.json", {"sep_token": "A"}),
    ],
)
def test_a_word_that_is_a_special_token_by_name_is_one_for_the_template_alone(tmp_path: Path, file: str, settings: dict[str, Any]) -> None:
    folder = model(tmp_path / "m", template="{% for m in messages %}A{{ m.content }}{% endfor %}")
    (folder / file).write_text(json.dumps(settings))
    with pytest.raises(DataError, match=r"^train.jsonl:3: the text 'A' can only be encoded as a control token; remove it$"):
        Renderer(folder).render(row("BAC"))
    ids = Renderer(folder).render(row("BC"))[1]
    assert Decoder(folder).decode(ids) == "BC"


def test_digests_decoder_and_prompts_in_a_chat_template_do_without_transformers(tmp_path: Path) -> None:
    folder = model(tmp_path / "m")
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    script = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); from penstock.pipeline.data.tokenization import Decoder, Renderer, digests\n"
        f"digests({str(folder)!r}); Decoder({str(folder)!r}).decode([1, 2]); Renderer({str(folder)!r})\n"
        "print([name for name in ('transformers', 'torch') if name in sys.modules])\n"
    )
    assert subprocess.run([sys.executable, "-P", "-c", script], check=True, capture_output=True, text=True).stdout.strip() == "[]"
