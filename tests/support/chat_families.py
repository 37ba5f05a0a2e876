"""Chat templates of ten model families, each with a small tokenizer that has the family's special tokens and way of splitting text."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from penstock.pipeline.data.conversation.template import ChatTemplate

FOLDER = Path(__file__).resolve().parents[1] / "data" / "chat_templates"
_TEXTS = [
    "system user assistant tool model The answer is 12. What is 3 + 4? I think so, it is seven.",
    'You are a helpful assistant. {"name": "add", "arguments": {"a": 1, "b": 22}} Today Date: 26 Jul 2024\n\n',
    "Environment: ipython functions commentary analysis final developer rules short (short) \n\n\n ...",
] * 3


@dataclass(frozen=True)
class Family:
    """A family of models; `template_stops` are those of its stop tokens that its template writes after an answer."""

    name: str
    special: tuple[str, ...]
    stops: tuple[str, ...]
    tool_format: str
    sentencepiece: bool = False
    call: str = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    """A call of a tool as its models write it."""
    strips_thinking: bool = False
    appends: bool = True
    """True if a question of the user may follow an answer that ended with the first stop token, without rendering the answer again."""


_CHATML = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
_DEEPSEEK_CALL = (
    '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{"a": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
)


def _named(form: str, names: str) -> tuple[str, ...]:
    return tuple(form % name for name in names.split())


FAMILIES = {
    family.name: family
    for family in (
        Family("qwen2_5", (*_CHATML, "<tool_call>", "</tool_call>"), ("<|im_end|>", "<|endoftext|>"), "hermes"),
        Family(
            "qwen3",
            (*_CHATML, "<tool_call>", "</tool_call>", "<think>", "</think>"),
            ("<|im_end|>", "<|endoftext|>"),
            "hermes",
            strips_thinking=True,
        ),
        Family(
            "llama3",
            ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>"),
            ("<|eot_id|>", "<|eom_id|>"),
            "llama3",
            call='{"name": "add", "parameters": {"a": 1}}',
        ),
        Family("smollm2", _CHATML, ("<|im_end|>",), "hermes"),
        Family(
            "mistral",
            (
                *("<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
                *("[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
            ),
            ("</s>",),
            "mistral",
            sentencepiece=True,
            call='[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]',
        ),
        Family("gemma", ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), ("<end_of_turn>", "<eos>"), "hermes", sentencepiece=True),
        Family(
            "phi",
            _named("<|%s|>", "system user assistant end endoftext tool /tool tool_call /tool_call tool_response"),
            ("<|end|>", "<|endoftext|>"),
            "phi4",
            call='<|tool_call|>[{"name": "add", "arguments": {"a": 1}}]<|/tool_call|>',
        ),
        Family(
            "deepseek_r1",
            _named("<｜%s｜>", "begin▁of▁sentence end▁of▁sentence User Assistant tool▁calls▁begin tool▁calls▁end tool▁call▁begin")
            + _named("<｜%s｜>", "tool▁call▁end tool▁sep tool▁outputs▁begin tool▁outputs▁end tool▁output▁begin tool▁output▁end"),
            ("<｜end▁of▁sentence｜>",),
            "deepseek",
            call="So be it.\n</think>\n\n" + _DEEPSEEK_CALL,
            strips_thinking=True,
        ),
        Family(
            "gpt_oss",
            _named("<|%s|>", "start end message channel constrain return call endoftext"),
            ("<|return|>", "<|call|>"),
            "harmony",
            call='<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}',
            strips_thinking=True,
            appends=False,
        ),
        Family("hostile", ("<bos>", "<eos>"), ("<eos>",), "hermes"),
    )
}


def source(name: str) -> str:
    """The Jinja source of a family's template."""
    return (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")


@lru_cache
def tokenizer(name: str) -> Any:
    """A tokenizer of 600 tokens at most; its merges cross what a careless rendering would cut."""
    family = FAMILIES[name]
    if family.sentencepiece:
        made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
        made.normalizer = normalizers.Replace(" ", "▁")
        made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        letters = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    else:
        made = Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        made.decoder = decoders.ByteLevel()
        letters = []
    alphabet = [] if family.sentencepiece else pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=letters, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(_TEXTS, trainer)
    plain = {"<tool_call>", "</tool_call>", "<think>", "</think>"}
    made.add_tokens([AddedToken(token, special=token not in plain, normalized=False) for token in family.special])
    return made


def stop_ids(name: str) -> list[int]:
    """The ids of a family's stop tokens, in its order."""
    return [tokenizer(name).token_to_id(stop) for stop in FAMILIES[name].stops]


@lru_cache
def template(name: str) -> ChatTemplate:
    """A family's template with its tokenizer."""
    special = FAMILIES[name].special
    return ChatTemplate(
        tokenizer(name), source(name), stop_ids=stop_ids(name), arguments={"bos_token": special[0], "eos_token": FAMILIES[name].stops[0]}
    )


def ids_of(name: str, text: str) -> list[int]:
    """The ids of a text in a family's tokenizer."""
    return list(tokenizer(name).encode(text, add_special_tokens=False).ids)


def answer(name: str, text: str, *, stop: int = 0) -> list[int]:
    """The ids of an answer, letter by letter as no tokenizer would split it, and a stop token of the family."""
    pieces = [text[i : i + 1] for i in range(len(text))] if "<" not in text and "[" not in text else [text]
    return [i for piece in pieces for i in ids_of(name, piece)] + [stop_ids(name)[stop]]


def version_of(turn: int, tokens: Sequence[int]) -> list[int]:
    """Policy versions for an answer's tokens: a new one in its middle."""
    return [turn + (index > len(tokens) // 2) for index in range(len(tokens))]
