"""What `penstock init` chooses follows from the model, the data and the machine."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.pipeline.launch.check.propose import LEAST_STEPS, MOST_PASSES, STEPS, Inputs

INSTRUCT = Inputs(
    rows=100, prompt_field="question", answer_field="answer", longest_prompt=100, longest_reference=20, context=8192, count=135 * 10**6,
    half=True, template=True, held_out=10, gpus=0, cores=8, bfloat16=False,
)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "room"),
    [
        ({}, 256),
        ({"gpus": 1}, 1024),
        ({"longest_reference": 400}, 408),
        ({"count": 10**5, "longest_reference": 3}, 32),
        ({"gpus": 1, "context": 512}, 512 - 128),
        ({"context": None, "longest_reference": 300}, 304),
    ],
    ids=["a CPU", "a GPU", "longer answers", "a model too small to reason", "a short context", "an unknown context"],
)
def test_completions_get_what_model_answers_and_machine_allow(changes: dict[str, int | None], room: int) -> None:
    assert replace(INSTRUCT, **changes).completion_room == room  # type: ignore[arg-type]


@given(prompt=st.integers(1, 4000), answer=st.integers(0, 4000), context=st.integers(4096, 10**5), gpus=st.integers(0, 8))
def test_prompt_and_completion_fit_into_the_context(prompt: int, answer: int, context: int, gpus: int) -> None:
    inputs = replace(INSTRUCT, longest_prompt=prompt, longest_reference=answer, context=context, gpus=gpus)
    assert prompt <= inputs.prompt_room and inputs.prompt_room + inputs.completion_room <= context


@given(rows=st.integers(1, 10**6), gpus=st.integers(0, 8))
def test_few_rows_are_not_trained_on_for_a_hundred_steps(rows: int, gpus: int) -> None:
    inputs = replace(INSTRUCT, rows=rows, held_out=0, gpus=gpus)
    assert LEAST_STEPS <= inputs.steps <= STEPS
    assert inputs.passes <= MOST_PASSES or inputs.steps == LEAST_STEPS
    assert inputs.steps == STEPS or inputs.passes > MOST_PASSES - 1


@pytest.mark.parametrize(
    ("bfloat16", "half", "count", "dtype"),
    [
        (False, True, 135 * 10**6, "float32"),
        (True, True, 135 * 10**6, "bfloat16"),
        (True, False, 135 * 10**6, "float32"),
        (True, False, 7 * 10**9, "bfloat16"),
        (True, True, 10**5, "float32"),
    ],
    ids=["no instructions for it", "saved in 16 bits", "saved in 32 bits", "large", "tiny"],
)
def test_bfloat16_needs_the_machine_and_a_model_that_loses_nothing_by_it(bfloat16: bool, half: bool, count: int, dtype: str) -> None:
    assert replace(INSTRUCT, bfloat16=bfloat16, half=half, count=count).dtype == dtype
