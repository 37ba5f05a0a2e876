"""What is tried before a run starts: each fault is one line and a status, and what was found before it has been told."""

import json
import math
import re
import shutil
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.infra.errors import PenstockError
from penstock.infra.memory.log import MemoryLog
from penstock.infra.tensors.parameter_count import parameters
from penstock.pipeline import cli
from penstock.pipeline.algorithms.advantages import RewardScale
from penstock.pipeline.cli.app import FAILED, OK, USAGE
from penstock.pipeline.config.load import Config, from_table, load
from penstock.pipeline.data.read_files import Row
from penstock.pipeline.launch.check import preflight, sizes
from penstock.pipeline.launch.check.preflight import ENOUGH, equal_and_low, refuse_reversed, swapped, unrewarded
from penstock.pipeline.launch.check.propose import propose
from penstock.pipeline.launch.create import check_inputs, create
from penstock.pipeline.runtime.weights.publish import Base, chain_state, deletable
from penstock.topics.weights import FIRST, Manifest
from penstock.workers.trainer.weight_publisher import WeightPublisher
from tests.support.examples import manifest_of
from tests.support.least_config import merged
from tests.support.light_model import light_model

ROWS = [{"question": f"What is {n} plus {n}?", "solution": str(2 * n), "level": n} for n in range(50)]


def project(folder: Path, *, reward: str = "return [float(a == b) for a, b in zip(completions, answer)]") -> Path:
    """A folder with a model without weights, fifty rows and a reward function."""
    folder.mkdir(exist_ok=True)
    light_model(folder / "model", context=512)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    (folder / "rew.py").write_text(f"def right(completions, answer, **columns):\n    {reward}\n", encoding="utf-8")
    return folder


def configured(folder: Path, **sections: dict[str, object]) -> Config:
    table = {
        "run": {"steps": 4},
        "model": {"path": str(folder / "model")},
        "data": {"source": str(folder / "rows.jsonl"), "prompt_field": "question", "answer_field": "solution", "max_prompt_tokens": 64},
        "reward": {"functions": [f"{folder}/rew.py:right"]},
    }
    return from_table(merged(table, sections))


def found(config: Config) -> tuple[dict[str, str], str | None]:
    """What was told, and the problem that ended it."""
    records: dict[str, str] = {}
    try:
        preflight.check(config, tell=records.__setitem__, samples=False)
    except (PenstockError, ValueError) as error:
        return records, str(error)
    return records, None


@pytest.mark.costly  # tries the reward in a child process
def test_a_sound_configuration_is_counted_and_its_reward_tried_on_the_answers(tmp_path: Path) -> None:
    records, problem = found(configured(project(tmp_path)))
    assert problem is None
    assert records["data"].startswith("50 rows")
    assert records["reward"] == "of the reference answers of 50 rows: all 1; of the reference answers of 2 rows: 1, 1"


def test_a_created_run_has_as_many_partitions_for_chunks_of_weights_as_it_asks_for(tmp_path: Path) -> None:
    project(tmp_path)
    log = MemoryLog()
    create(configured(tmp_path), log=log, run_id="eight", notify=lambda _: None)
    create(configured(tmp_path, weights={"partitions": 3}), log=log, run_id="three", notify=lambda _: None)
    assert (log.partitions("eight.weights"), log.partitions("three.weights")) == (FIRST + 8 + 1, FIRST + 3 + 1)


@pytest.mark.parametrize(
    ("run", "trainer", "algorithm", "records"),
    [
        ({"epochs": 1}, {"lr_schedule": "linear"}, {}, True),
        ({"epochs": 2}, {"lr_schedule": "cosine"}, {}, True),
        ({"epochs": 1}, {"lr_schedule": "constant"}, {}, False),
        ({"epochs": 1}, {"lr_schedule": "linear"}, {"filter_zero_variance": False}, False),
        ({"steps": 6}, {"lr_schedule": "linear"}, {}, False),
    ],
)
def test_a_learning_rate_that_may_not_reach_its_end_is_told_of(
    tmp_path: Path, run: dict[str, object], trainer: dict[str, object], algorithm: dict[str, object], *, records: bool
) -> None:
    said: list[str] = []
    config = configured(project(tmp_path), run={"steps": None, **run}, trainer=trainer, algorithm=algorithm)
    check_inputs(config, notify=said.append)
    assert any("trainer.lr_schedule" in line and "run.steps fixes the number of steps" in line for line in said) == records


def test_a_sample_that_may_be_larger_than_a_micro_batch_is_told_of(tmp_path: Path) -> None:
    said: list[str] = []
    for tokens in (79, 80):
        config = configured(project(tmp_path / str(tokens)), sampling={"max_new_tokens": 16}, trainer={"micro_batch_tokens": tokens})
        check_inputs(config, notify=said.append)
    assert [line for line in said if "micro" in line] == [
        "trainer.micro_batch_tokens = 79: a sample may have 80 tokens with its prompt; a sample longer than a micro-batch forms one "
        "alone, regardless of its memory"
    ]


@pytest.mark.costly  # tries the reward in a child process
@pytest.mark.parametrize(
    ("reward", "said"),
    [
        ("return [1.0]", "returned 1 values for 2 completions"),
        ("return [1 / 0]", "ZeroDivisionError: division by zero (rew.py line 2)"),
        ("return [1.0, 2.0, 3.0]", "returned 3 values for 2 completions"),
        ("return ['right'] * len(completions)", "expected a number or None"),
        ("import time; time.sleep(60)", "took longer than 2 s"),
        ("import no_such_package", "No module named 'no_such_package'"),
    ],
    ids=["one for all", "it raises", "too many values", "no number", "it hangs", "it wants a package"],
)
def test_a_reward_that_cannot_judge_is_refused_with_its_line(tmp_path: Path, reward: str, said: str) -> None:
    records, problem = found(configured(project(tmp_path, reward=reward), reward={"timeout_s": 2.0}))
    assert "one step" in records
    assert problem is not None and said in problem and "\n" not in problem


FAILS_ONCE = "return [float(a == b) if n != {} else 1 / 0 for a, b, n in zip(completions, answer, columns['level'])]"


@pytest.mark.costly  # tries the reward in child processes
def test_a_reward_that_fails_for_one_row_or_for_an_empty_completion_is_told_without_the_engine(tmp_path: Path) -> None:
    records, problem = found(configured(project(tmp_path, reward=FAILS_ONCE.format(30))))
    assert re.fullmatch(r"the reward of .*rows.jsonl:31: reward .*rew.py:right broke: ZeroDivisionError.*line 2\)", problem or "")
    assert "reward" not in records
    records, problem = found(configured(tmp_path, reward={"on_error": "drop"}))
    assert problem is None and records["reward"].startswith("of the reference answers of 50 rows: all 1, 1 without a reward; ")
    assert records["warning"].startswith("2 of 104 completions have no reward and would not be trained: the reward of ")  # and two pairs
    for fails, refused in ((FAILS_ONCE.format(0), False), ("return [1 / 0]", True)):
        (tmp_path / "rew.py").write_text(f"def right(completions, answer, **columns):\n    {fails}\n", encoding="utf-8")
        assert ("ZeroDivisionError" in str(found(configured(tmp_path, reward={"on_error": "drop"}))[1])) == refused
    first_letter = "[float(text[0] == a[0]) for text, a in zip(completions, answer)]"
    (tmp_path / "rew.py").write_text(f"def right(completions, answer, **columns):\n    return {first_letter}\n", encoding="utf-8")
    for on_error in ("stop", "drop"):
        records, problem = found(configured(tmp_path, reward={"on_error": on_error}))
        assert problem is None and records["reward"].endswith("of 2 rows: 1, 1")
        assert "rows.jsonl:1 for an empty completion: reward " in records["warning"] and "IndexError" in records["warning"]


@pytest.mark.costly  # tries the reward in child processes
@pytest.mark.parametrize(
    ("body", "problem", "warning"),
    [
        ("return [float(a == b) for a, b in zip(completions, answer)]", None, None),
        ("return [float(text[0] == a[0]) for text, a in zip(completions, answer)]", None, "for an empty completion: .*IndexError"),
        ("return [1.0 - completions.index(text) / len(completions) for text in completions]", None, None),
        ("return [float('nan') if text == '60' else 1.0 for text in completions]", "rows.jsonl:31: .* nan for completion 0", None),
        ("return {'right': [float(a == b) for a, b in zip(completions, answer)], 'long': [None] * len(completions)}", None, None),
    ],
    ids=["plain", "empty", "compares", "NaN", "parts"],
)
def test_async_rewards_and_several_with_weights_are_tried_as_one(
    tmp_path: Path, body: str, problem: str | None, warning: str | None
) -> None:
    project(tmp_path)
    (tmp_path / "rew.py").write_text(f"async def right(completions, answer, **columns):\n    {body}\n", encoding="utf-8")
    several = {"functions": [f"{tmp_path}/rew.py:right", "exact_match"], "weights": [1.0, 0.5]}
    for reward in ({}, several):
        records, refused = found(configured(tmp_path, reward=reward))
        assert re.search(problem, str(refused)) if problem else refused is None
        assert re.search(warning, records["warning"]) if warning else "warning" not in records
    if not problem:
        assert records["reward"].endswith("of 2 rows: 1.5, 1.5")


@pytest.mark.costly  # tries the reward in child processes
@pytest.mark.parametrize("nones", ["[None] * len(completions)", "[{'a': None} for _ in completions]"])
def test_a_reward_that_is_none_for_all_rows_is_refused_only_if_they_have_a_reference(tmp_path: Path, nones: str) -> None:
    project(tmp_path, reward=f"return {nones}")
    records, problem = found(configured(tmp_path))
    assert "every reward function returned None for the reference answers of 50 rows" in str(problem)
    (tmp_path / "rew.py").write_text(f"def right(completions, **columns):\n    return {nones}\n", encoding="utf-8")
    records, problem = found(configured(tmp_path, data={"answer_field": ""}))
    assert problem is None
    assert records["reward"].endswith("of the prompts of 2 rows, which have no reference answers: none, none")
    assert records["warning"].endswith("for the prompts of 50 rows, which have no reference answers; such samples are not trained")


@pytest.mark.costly  # tries the reward in a child process
@pytest.mark.parametrize(
    ("sections", "said"),
    [
        (
            {"data": {"prompt_field": "prompt"}},
            "no field 'prompt' (data.prompt_field); did you mean 'question'? (the row has: question, solution, level) (all 50 rows)",
        ),
        ({"reward": {"functions": ["rew.py:wrong"]}}, "rew.py does not exist"),
        ({"trainer": {"device": "cuda"}}, "no GPU is visible on this machine"),
        ({"trainer": {"gpus": 1}}, "1 GPUs are required"),
        ({"sampling": {"max_new_tokens": 4000}}, "exceeds the model's context of 512 tokens"),
        ({"model": {"path": "HuggingFaceTB/SmolLM2-135M"}}, "for a model of the hub write hf:HuggingFaceTB/SmolLM2-135M;"),
    ],
    ids=["column", "reward file", "device", "GPUs", "context", "hub name"],
)
def test_what_would_fail_later_fails_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sections: dict[str, dict[str, object]], said: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    _, problem = found(configured(project(tmp_path), **sections))
    assert said in (problem or "")


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({"architectures": ["BertForMaskedLM"]}, "BertForMaskedLM"),
        ({"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True}, "T5ForConditionalGeneration"),
        ({"is_encoder_decoder": True}, "an encoder and decoder"),
        ({"architectures": ["Qwen3ForCausalLM"]}, None),
        ({"architectures": ["GPT2LMHeadModel"], "is_encoder_decoder": False}, None),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "quantised (awq) and cannot be trained"),
    ],
)
def test_a_model_that_is_no_causal_language_model_or_quantised_is_refused_by_its_configuration(
    tmp_path: Path, settings: dict[str, object], kind: str | None
) -> None:
    file = project(tmp_path) / "model" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}), encoding="utf-8")
    problem = found(configured(tmp_path))[1]
    assert (problem is None) == (kind is None), problem
    line = f"is {kind}" if "quantised" in str(kind) else f"is {kind}, no causal language model; use a model whose architectures"
    assert kind is None or line in (problem or "")


def with_weights(folder: Path, shape: tuple[int, ...], *, there: int | None = None) -> None:
    """A weights file of which so many bytes are there after its header; all of them, as a hole, by default."""
    size = 4 * math.prod(shape)
    header = json.dumps({"__metadata__": {}, "w": {"dtype": "F32", "shape": list(shape), "data_offsets": [0, size]}}).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + (size if there is None else there))


@pytest.mark.costly  # tries the reward in a child process
def test_a_run_that_cannot_fit_on_the_disk_is_refused_before_it_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = project(tmp_path)
    with_weights(folder / "model", (1000, 1_000_000))
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path / "home"))
    assert parameters(folder / "model") == 10**9
    records, problem = found(configured(folder, run={"steps": 100_000}))
    assert records["weights"].startswith("4.0 GB whole, every 20 versions; a delta about 4.0 GB")
    assert "400.0 TB of weights (at most 400.0 TB)" in records["disk"]
    assert "the disk would be full after step " in (problem or "")
    assert not (tmp_path / "home").exists()


@pytest.mark.costly  # tries the reward in a child process
@pytest.mark.parametrize(("export", "fits"), [(True, False), (False, True)])
def test_the_exported_model_has_to_fit_on_the_disk_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, export: bool, fits: bool
) -> None:
    folder = project(tmp_path)
    with_weights(folder / "model", (1000, 1_000))
    config = configured(folder, trainer={"export": export, "checkpoint_every": 0})
    growth = sizes.Growth(config=config, count=10**6, share=1.0)
    assert growth.exported == (growth.whole if export else 0)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=growth.weights(4) + growth.kept_samples(4)))
    assert (found(config)[1] is None) == fits


@pytest.mark.costly  # tries the reward in a child process
@pytest.mark.parametrize(
    ("free", "keep", "said"),
    [
        (10**14, "all", None),
        (10**13, "all", 'set weights.keep = "chain" ('),
        (10**10, "all", "are free; set kafka.keep_steps, lower run.steps"),
        (10**13, "chain", None),
    ],
)
def test_what_a_run_takes_follows_from_its_deltas_and_from_what_is_kept_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, keep: str, said: str | None
) -> None:
    folder = project(tmp_path)
    with_weights(folder / "model", (1000, 1_000_000))
    monkeypatch.setattr(sizes.shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    sections = {"run": {"steps": 200_000}, "trainer": {"dtype": "bfloat16", "lr": 1e-6}, "weights": {"keep": keep}}
    records, problem = found(configured(folder, **sections))
    assert "2.0 GB whole, every 20 versions; a delta about 12.0 MB" in records["weights"]
    assert said is None or said in (problem or "")
    assert (problem is None) == (said is None), problem


@pytest.mark.parametrize(("every", "share"), [(20, 0.01), (20, 0.3), (7, 1.0), (1, 0.5)])
def test_the_bytes_of_the_weights_are_those_that_the_publisher_makes_and_retention_leaves(tmp_path: Path, every: int, share: float) -> None:
    folder, whole = project(tmp_path), 4 * 10**9
    config = configured(folder, weights={"anchor_every": every}, trainer={"checkpoint_every": 0})
    chained = config.model_copy(update={"weights": config.weights.model_copy(update={"keep": "chain"})})
    kept, short = (sizes.Growth(config=chosen, count=10**9, share=share) for chosen in (config, chained))
    publisher, manifests, sent = WeightPublisher(MemoryLog(), "r", config.weights, 4), dict[int, Manifest](), list[Manifest]()
    for version in range(100):
        publisher.base = Base(version=version - 1, tensors=())
        delta = bool(manifests) and publisher._may_be_delta(manifests)
        manifests[version] = manifest(version, nbytes=int(share * whole) if delta else whole, base=version - 1 if delta else None)
        sent.append(manifests[version])
        if delta and chain_state(manifests, version, every=every) == "long":
            manifests[version] = replace(manifest(version, nbytes=whole, base=None), chunk_partitions=(3,))
            sent.append(manifests[version])
        log = kept.here(version) - version * kept.samples - kept.exported
        assert kept.weights(version) == sum(one.nbytes for one in sent) == log
        before = deletable(manifests, ends={2: version, 3: version}, every=every)
        lying = sum(one.nbytes for one in sent if one.chunk_offsets[0] >= before.get(one.chunk_partitions[0], 0))
        assert short.weights(version) >= lying
    assert short.weights(100) == short.weights(10**6) >= lying


def test_adapters_are_counted_once_a_version_and_in_intervals_where_old_ones_are_deleted(tmp_path: Path) -> None:
    config = configured(project(tmp_path), trainer={"lora_rank": 16}, weights={"anchor_every": 4})
    chained = config.model_copy(update={"weights": config.weights.model_copy(update={"keep": "chain"})})
    kept, short = (sizes.Growth(config=chosen, count=10**9, share=1.0, adapters=10**8) for chosen in (config, chained))
    assert kept.weights(100) == kept.whole + 100 * 10**8
    assert short.weights(3) == kept.weights(3)
    assert kept.whole + 8 * 10**8 < short.weights(100) == short.weights(10**6) < kept.weights(100)


def manifest(version: int, *, nbytes: int, base: int | None) -> Manifest:
    """A version in one chunk: those after version 0 lie one behind the other in a partition."""
    place = {"chunk_partitions": (2 if version else 1,), "chunk_offsets": (max(0, version - 1),), "chunk_sizes": (nbytes,)}
    return manifest_of(version, encoding="full" if base is None else "delta", base_version=base, nbytes=nbytes, **place)


@pytest.mark.costly  # tries the reward in a child process
def test_a_weights_file_that_is_cut_off_is_named(tmp_path: Path) -> None:
    folder = project(tmp_path)
    (folder / "model" / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{")
    assert "is not a safetensors file, or is truncated" in (found(configured(folder))[1] or "")
    with_weights(folder / "model", (10, 10), there=399)  # as an interrupted copy leaves it
    assert "truncated: copy it again" in (found(configured(folder))[1] or "")
    with_weights(folder / "model", (10, 10), there=400)
    assert found(configured(folder))[1] is None


@pytest.mark.costly  # tries the reward in a child process
def test_what_init_writes_passes_the_check_and_names_the_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    folder = project(tmp_path)
    text = propose("model", "rows.jsonl", ["rew.py:right"], base=folder)
    (folder / "my.toml").write_text(text, encoding="utf-8")
    config = load(folder / "my.toml")
    assert (config.data.prompt_field, config.data.answer_field) == ("question", "solution")
    assert (config.data.limit, config.eval.start, config.eval.limit) == (45, 45, 5)
    assert 24 <= config.data.max_prompt_tokens <= 32
    assert found(config)[1] is None


@pytest.mark.parametrize("gpus", ["", "0", "0,1", "0,1,2"])
def test_init_plans_for_the_gpus_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    monkeypatch.setattr("penstock.infra.engines.vllm.start.find_spec", lambda _name: None)
    folder = project(tmp_path)
    (folder / "my.toml").write_text(propose("model", "rows.jsonl", ["rew.py:right"], base=folder), encoding="utf-8")
    config, count = load(folder / "my.toml"), len(gpus.split(",")) if gpus else 0
    assert config.rollout.engine == "transformers"
    assert config.trainer.gpus == (1 if count > 1 else 0) and config.rollout.workers == max(1, count - 1)
    assert config.eval_sources and config.evaluates_on_rollout_engine == (count > 0) and config.colocated == (count == 1)
    preflight.check_devices(config)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model", "nowhere", "--data", "rows.jsonl", "--reward", "rew.py:right"], "there is no directory"),
        (["--model", "model", "--data", "nowhere.jsonl", "--reward", "rew.py:right"], "nowhere.jsonl"),
        (["--model", "model", "--data", "rows.jsonl", "--reward", "rew.py:rigth"], "did you mean 'right'?"),
        (["--model", "model", "--data", "odd.jsonl", "--reward", "exact_match"], "name one with --prompt-field"),
        (["--model", "model", "--data", "rows.jsonl", "--reward", "exact_match", "--prompt-field", "qestion"], "did you mean 'question'?"),
        (["--model", "model", "--data", "rows.jsonl", "--reward", "exact_match", "-o", "rew.py"], "the file already exists"),
    ],
)
def test_init_refuses_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    (project(tmp_path) / "odd.jsonl").write_text('{"a": "x", "b": "y"}\n', encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["init", *words]) in (FAILED, USAGE)
    captured = capsys.readouterr()
    assert (captured.out, len(captured.err.splitlines())) == ("", 1)
    assert said in captured.err


def test_init_prints_a_configuration_and_nothing_else_on_stdout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(project(tmp_path))
    assert cli.main(["init", "--model", "model", "--data", "rows.jsonl", "--reward", "rew.py:right"]) == OK
    captured = capsys.readouterr()
    assert captured.err.splitlines()[0].endswith("measuring the lengths of prompts and answers of 50 rows with the model's tokenizer")
    (tmp_path / "my.toml").write_text(captured.out, encoding="utf-8")
    assert load(tmp_path / "my.toml").data.source == str(tmp_path / "rows.jsonl")


@pytest.mark.costly
@pytest.mark.parametrize("engine", ["toy", pytest.param("transformers", marks=pytest.mark.slow)])
def test_check_draws_the_samples_of_a_step_by_the_engine_and_judges_them(tmp_path: Path, engine: str) -> None:
    project(tmp_path, reward="return [float(len(text)) for text in completions]")
    model = tmp_path / "model"
    if engine == "transformers":
        from penstock.pipeline.data.tiny.model import make_tiny_model

        model = make_tiny_model(tmp_path / "tiny", steps=1)
    config = configured(tmp_path, model={"path": str(model)}, sampling={"max_new_tokens": 5}, rollout={"engine": engine})
    records, said = dict[str, str](), list[str]()
    checked = preflight.check(config, tell=records.__setitem__, samples=True, notify=said.append)
    assert said[-1] == f"loading the model into the {engine} engine, to generate the samples of a step, at most 64"
    assert [sample["answer"] for sample in checked.samples] == [str(2 * number) for number in range(8) for _ in range(8)]
    assert all(sample["reward"] == len(sample["completion"]) for sample in checked.samples)
    assert "What is 1 plus 1?" in records["sample 2"] and records["rewards"].startswith("of 64 samples of 8 prompts: ")
    assert "generation" in records and (" of training for " in records["time"]) == (engine == "transformers")  # no weights, no training


@pytest.mark.costly
def test_an_engine_that_cannot_load_is_one_line(tmp_path: Path) -> None:
    config = configured(project(tmp_path), rollout={"engine": "transformers"})
    with pytest.raises(PenstockError) as caught:
        preflight.generate(config, {})
    assert "\n" not in str(caught.value) and "Traceback" not in str(caught.value)


def rows_of(*answers: str | None) -> list[Row]:
    made = []
    for number, answer in enumerate(answers):
        columns = {} if answer is None else {"answer": answer}
        made.append(Row(index=number, origin=f"rows.jsonl line {number + 1}", prompt=f"{number}?", messages=None, columns=columns))
    return made


def refused(answers: list[str], reward: Callable[[str, str], float]) -> str | None:
    """The line that refuses a reward of (completion, answer); None if it passes."""
    rows = rows_of(*answers)
    pairs = swapped(rows, answers)
    right = [reward(answers[own], answers[own]) for own, _ in pairs]
    wrong = [reward(answers[other], answers[own]) for own, other in pairs]
    try:
        refuse_reversed([rows[own] for own, _ in pairs], right, wrong)
    except PenstockError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    "reward",
    [
        lambda text, answer: -float(text == answer),
        lambda text, answer: float(text != answer),
        lambda text, answer: 1.0 - float(text == answer),
        lambda text, answer: 0.5 * float(text == answer) - 2.0 * float(text == answer),
        lambda text, answer: float(abs(int(text) - int(answer))),
    ],
    ids=["negative", "unequal", "one minus", "negative weights", "distance"],
)
def test_a_reward_that_prefers_wrong_answers_is_refused_with_both_rewards(reward: Callable[[str, str], float]) -> None:
    line = str(refused(["4", "4", "7"], reward))
    assert line.startswith(
        "reward.functions: a wrong answer earns more than the right one: for rows.jsonl line 1 the right answer has the reward "
    )
    assert "that of rows.jsonl line 3" in line and "\n" not in line


@settings(max_examples=40)
@given(st.lists(st.text("abc", max_size=3), min_size=1, max_size=6), st.dictionaries(st.text("abc", max_size=3), st.floats(-9, 9)))
def test_a_reward_that_does_not_look_at_the_row_is_never_refused(answers: list[str], rewards: dict[str, float]) -> None:
    assert refused(answers, lambda text, _: rewards.get(text, 0.0)) is None
    assert refused(answers, lambda text, answer: float(text == answer)) is None


@pytest.mark.parametrize(
    ("right", "wrong", "warned"),
    [
        ([0.0, 0.0], [0.0, 0.0], True),  # a reward that is always 0
        ([-1.0], [], True),
        ([0.0, 1.0], [0.0, 0.0], False),
        ([0.0, 0.0], [-3.0, -3.0], False),  # the negative distance to the answer
        ([], [], False),
    ],
)
def test_a_reward_that_gives_right_answers_nothing_is_warned_of(right: list[float], wrong: list[float], warned: bool) -> None:
    assert (unrewarded(right, wrong) is not None) == warned


def test_rows_without_an_answer_or_with_the_same_one_are_not_compared() -> None:
    assert swapped(rows_of(None, "a", None, "a"), ["p", "a", "q", "a"]) == []
    assert swapped(rows_of(None, "a", None, "b"), ["p", "a", "q", "b"]) == [(1, 3), (3, 1)]
    assert swapped([], []) == []


@pytest.mark.costly  # tries the reward in a child process
def test_check_and_run_refuse_a_reversed_reward(tmp_path: Path) -> None:
    reversed_reward = "return [-float(a == b) for a, b in zip(completions, answer)]"
    records, problem = found(configured(project(tmp_path, reward=reversed_reward)))
    assert "a wrong answer earns more than the right one" in str(problem) and "disk" in records | {"disk": ""}


@pytest.mark.parametrize("rewards", [[0.0] * 8, [0.3, 0.1 + 0.2] * 4, [-1.0] * 8, [0.49] * 2])
def test_samples_that_all_have_the_same_low_reward_are_a_warning_and_many_of_them_are_refused(rewards: list[float]) -> None:
    scale = RewardScale(-1.0 if min(rewards) < 0 else 0.0, 1.0)
    said = r"all {} sampled completions have the reward .* the task is too hard: use easier"
    assert re.match(said.format(len(rewards)), equal_and_low(rewards, scale) or "")
    many = rewards * (ENOUGH // len(rewards))
    with pytest.raises(PenstockError, match=said.format(len(many))):
        equal_and_low(many, scale)


@pytest.mark.parametrize("rewards", [[0.0] * 7 + [1.0], [1.0] * 8, [0.5] * 8, [0.0], []])
def test_samples_that_differ_or_have_a_high_reward_pass_and_so_do_fewer_than_two(rewards: list[float]) -> None:
    assert equal_and_low(rewards, RewardScale(0.0, 1.0)) is None
    assert equal_and_low([0.0] * ENOUGH, RewardScale(0.0, 0.0)) is None, "without a known range no reward is low"
