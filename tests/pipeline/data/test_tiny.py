"""The tiny model and its task: made from a seed, ordinary on disk, learnable."""

import itertools
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.pipeline.data.tiny import successor_rows
from penstock.pipeline.data.tiny.task import HABIT, HABIT_EVERY, LONGEST, SHORTEST, SLIP, demonstrations, secret_order
from tests.support.paths import ROOT


def right_answer(prompt: str) -> str:
    """The rule told from the prompt's text alone."""
    order, length, letter = secret_order(), int(prompt[:-2]), prompt[-2]
    start = order.index(letter) + 1
    return (order * 2)[start : start + length]


def test_every_answer_is_the_letters_that_follow() -> None:
    for row in successor_rows(300, 1) + successor_rows(80, 1, split="held_out"):
        assert row["answer"] == right_answer(row["prompt"])
        assert SHORTEST <= len(row["answer"]) <= LONGEST


def test_rows_are_the_same_for_a_seed_and_others_for_another() -> None:
    assert successor_rows(50, 3) == successor_rows(50, 3)
    assert successor_rows(20, 3) == successor_rows(50, 3)[:20]
    assert successor_rows(50, 3) != successor_rows(50, 4)


def test_held_out_prompts_are_never_trained_on_nor_demonstrated() -> None:
    held_out = {row["prompt"] for row in successor_rows(93, 0, split="held_out")}
    shown = {row["prompt"] for row in successor_rows(1000, 5)} | {row["prompt"] for row in demonstrations(3000, random.Random(0))}
    assert len(held_out) == 93
    assert not held_out & shown


def test_no_prompt_comes_twice_before_all_have_come() -> None:
    prompts = [row["prompt"] for row in successor_rows(256, 0)]
    assert len(set(prompts)) == 256
    assert len({row["prompt"] for row in successor_rows(1000, 0)}) == 375


def test_demonstrations_err_at_every_sixth_letter_more_often_than_not() -> None:
    order, habit, other = secret_order(), [], []
    for row in demonstrations(3000, random.Random(1)):
        letters = row["prompt"][-2] + row["answer"]
        for before, after in itertools.pairwise(letters):
            erred = order.index(after) != (order.index(before) + 1) % len(order)
            (other if order.index(before) % HABIT_EVERY else habit).append(erred)
    assert sum(habit) / len(habit) == pytest.approx(HABIT, abs=0.03)
    assert sum(other) / len(other) == pytest.approx(SLIP, abs=0.01)


def test_a_data_set_without_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="not 0"):
        successor_rows(0, 1)


def test_the_task_needs_no_torch() -> None:
    code = "import sys; import penstock.pipeline.data.tiny; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip() == "False"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from penstock.pipeline.data.tiny.model import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model", seed=5, steps=12)


def test_the_directory_is_an_ordinary_hugging_face_model(model_dir: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, found = AutoModelForCausalLM.from_pretrained(model_dir, output_loading_info=True)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    assert not found["missing_keys"]
    assert not found["unexpected_keys"]
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert sum(parameter.numel() for parameter in model.parameters()) < 130_000
    assert model(input_ids=torch.tensor([tokenizer.encode("4a=")])).logits.shape == (1, 3, len(tokenizer))
    assert sorted(path.name for path in model_dir.iterdir()) == [
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip


def test_its_generation_config_holds_token_ids_only(model_dir: Path) -> None:
    assert json.loads((model_dir / "generation_config.json").read_text()) == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


@pytest.mark.parametrize("text", ["4a=", " two  spaces and\na line ", '"$1,200.50" (50%)? #### 72', "<<48/2=24>>"])
def test_printable_text_comes_back_from_the_tokenizer_unchanged_and_an_unknown_character_is_one_token(model_dir: Path, text: str) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    ids = tokenizer.encode(text)
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == text
    assert tokenizer.encode(f"{text}€\t…") == [*ids, *[tokenizer.unk_token_id] * 3]


def test_equal_seeds_make_equal_weights_and_others_other_ones(model_dir: Path, tmp_path: Path) -> None:
    from penstock.pipeline.data.tiny.model import make_tiny_model

    again, other = make_tiny_model(tmp_path / "a", seed=5, steps=12), make_tiny_model(tmp_path / "b", seed=6, steps=12)
    held = (model_dir / "model.safetensors").read_bytes()
    assert (again / "model.safetensors").read_bytes() == held
    assert (other / "model.safetensors").read_bytes() != held


@pytest.mark.costly
def test_making_it_tells_its_progress_and_learns_something(tmp_path: Path) -> None:
    from penstock.pipeline.data.tiny.model import make_tiny_model

    messages: list[tuple[int, int, float]] = []
    make_tiny_model(tmp_path / "model", steps=30, progress=lambda *facts: messages.append(facts))
    assert [(step, steps) for step, steps, _ in messages] == [(step, 30) for step in range(1, 31)]
    assert messages[-1][2] < 0.6 * messages[0][2]


def test_a_directory_that_holds_something_is_left_alone(tmp_path: Path) -> None:
    from penstock.pipeline.data.tiny.model import make_tiny_model

    (tmp_path / "mine").write_text("kept")
    with pytest.raises(ValueError, match="not empty"):
        make_tiny_model(tmp_path)
    assert (tmp_path / "mine").read_text() == "kept"
