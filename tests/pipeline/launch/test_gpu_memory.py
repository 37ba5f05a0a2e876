"""The memory of GPUs decides what `init` writes, what `check` refuses and which splits `plan` compares."""

import re
from pathlib import Path
from typing import Any

import pytest

from penstock.infra.backends.hardware import GIB, MEMORY, gpu_memory
from penstock.pipeline import cli
from penstock.pipeline.cli.app import OK, USAGE
from penstock.pipeline.config.load import Config, ConfigError, load, with_values
from penstock.pipeline.launch.check import propose
from penstock.pipeline.launch.check.fit import PLANNED, exceeded, memory_line, planned
from penstock.pipeline.launch.check.memory import UTILIZATION, Shape, cached_rows, shape_of
from penstock.pipeline.launch.check.propose import Inputs, written
from tests.support.sparse_model import sizes, sparse_model

COUNTS = {"0.5B": 494, "1.5B": 1544, "7B": 7616, "14B": 14770, "32B": 32764}
"""Millions of parameters."""
USUAL: dict[str, Any] = {"samples_per_prompt": 8, "longest": 1024}
TABLE = """
0.5B 1 x 24: 1+1x1 torch checkpointing 16384 tokens 512 rows
0.5B 4 x 24: 2+2x1 zero-2 8192 tokens 512 rows
0.5B 8 x 80: 4+4x1 torch 16384 tokens 512 rows
1.5B 1 x 24: 1+1x1 torch lora checkpointing 16384 tokens 256 rows
1.5B 4 x 24: 2+2x1 zero-2 checkpointing 4096 tokens 256 rows
1.5B 8 x 24: 4+4x1 zero-2 checkpointing 16384 tokens 256 rows
1.5B 2 x 40: 1+1x1 torch checkpointing 16384 tokens 512 rows
1.5B 1 x 80: 1+1x1 torch 8192 tokens 512 rows
1.5B 4 x 80: 2+2x1 zero-2 16384 tokens 512 rows
7B   1 x 24: 1+1x1 torch lora checkpointing 4096 tokens 32 rows
7B   4 x 24: 2+1x2 torch lora checkpointing 4096 tokens 256 rows
7B   8 x 24: 4+2x2 torch lora checkpointing 4096 tokens 256 rows
7B   4 x 40: 2+2x1 torch lora checkpointing 16384 tokens 128 rows
7B   8 x 40: 6+2x1 zero-3 checkpointing 8192 tokens 128 rows
7B   1 x 80: 1+1x1 torch lora checkpointing 16384 tokens 512 rows
7B   4 x 80: 3+1x1 zero-2 checkpointing 16384 tokens 256 rows
7B   8 x 80: 4+4x1 zero-2 checkpointing 16384 tokens 256 rows
14B  1 x 24: the trainer needs 37.2 GB of a GPU and may take 22.7 GB of its 25.8 GB
14B  2 x 24: a rollout worker needs 37.9 GB of a GPU and may take 23.2 GB of its 25.8 GB
14B  8 x 24: the trainer needs 35.9 GB of a GPU and may take 22.7 GB of its 25.8 GB
14B  1 x 40: 1+1x1 torch lora checkpointing 2048 tokens 16 rows
14B  4 x 40: 2+1x2 torch lora checkpointing 4096 tokens 128 rows
14B  8 x 40: 4+1x4 torch lora checkpointing 4096 tokens 256 rows
14B  8 x 80: 5+3x1 zero-3 checkpointing 8192 tokens 128 rows
32B  2 x 40: a rollout worker needs 76.0 GB of a GPU and may take 38.7 GB of its 42.9 GB
32B  1 x 80: the trainer needs 76.3 GB of a GPU and may take 75.6 GB of its 85.9 GB
32B  2 x 80: 1+1x1 torch lora checkpointing 2048 tokens 16 rows
32B  8 x 80: 6+1x2 torch lora checkpointing 2048 tokens 128 rows
"""
"""Model, GPUs x GiB: GPUs of the trainer + engines x GPUs of each, and how the trainer computes; or the refusal."""
CELLS = {tuple(cell.split()): text.strip() for cell, _, text in (line.partition(":") for line in TABLE.strip().splitlines())}


def shape(name: str) -> Shape:
    of_model = shape_of(sizes(name))
    assert of_model is not None
    return of_model


def inputs(name: str, *, gpus: int, gib: int) -> Inputs:
    return Inputs(
        rows=1000, prompt_field="question", answer_field="answer", longest_prompt=250, longest_reference=20, context=32768,
        count=COUNTS[name] * 10**6, half=True, template=True, held_out=64, gpus=gpus, cores=16, bfloat16=True, shape=shape(name),
        memory=(gib * GIB,) * gpus,
    )  # fmt: skip


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM for GPUs counts as installed."""
    monkeypatch.setattr(propose, "check_engine", lambda _config: None)


def proposal(name: str, *, gpus: int, gib: int) -> Config:
    """What `init` writes, as a run reads it."""
    chosen = inputs(name, gpus=gpus, gib=gib)
    text = written(name, "rows.jsonl", ["exact_match"], chosen, base=Path(), notify=lambda _: None)
    return propose._loaded(text, Path(), chosen)


def as_row(config: Config) -> str:
    trainer, rollout = config.trainer, config.rollout
    way = trainer.backend if trainer.backend == "torch" else f"zero-{trainer.zero_stage}"
    way += f"{' lora' if trainer.lora_rank else ''}{' checkpointing' if trainer.gradient_checkpointing else ''}"
    division = f"{trainer.processes}+{rollout.workers}x{config.engine.gpus(rollout.vllm)}"
    return f"{division} {way} {trainer.micro_batch_tokens} tokens {rollout.concurrency} rows"


@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize(("name", "gpus", "_x", "gib"), CELLS)
def test_init_writes_what_fits_or_refuses_in_one_line_and_plan_compares_the_same_splits(
    name: str, gpus: str, _x: str, gib: str, tmp_path: Path
) -> None:
    row, memory, model = CELLS[name, gpus, "x", gib], (int(gib) * GIB,) * int(gpus), sparse_model(tmp_path / "model", name)
    if " needs " in row:
        refusal = f"^{re.escape(row)} .*, and no setting needs less: use a smaller model, or GPUs with more memory$"
        with pytest.raises(ConfigError, match=refusal):
            proposal(name, gpus=int(gpus), gib=int(gib))
        if gpus != "1":
            with pytest.raises(ConfigError, match=refusal):
                planned(model, memory, engine_size=1, **USUAL)
        return
    config = proposal(name, gpus=int(gpus), gib=int(gib))
    assert as_row(config) == row
    assert exceeded(config, shape(name), memory, share=PLANNED) is None
    assert cached_rows(config, shape(name), memory[0]) >= config.rollout.concurrency
    if gpus != "1":
        assert config.trainer.gpus + config.rollout.workers * config.rollout.gpus_per_worker == len(memory)
        assert config.trainer.gpus in planned(model, memory, engine_size=config.rollout.gpus_per_worker, **USUAL)


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a 7B, seen from a machine with eight GPUs of 80 GiB."""
    sparse_model(tmp_path / "model", "7B")
    (tmp_path / "rows.jsonl").write_text('{"question": "What?", "answer": "that"}\n' * 64)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    monkeypatch.setenv(MEMORY, "80")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def configured(node: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> Config:
    monkeypatch.setattr(propose, "check_engine", lambda _config: None)
    text = propose.propose("model", "rows.jsonl", ["exact_match"], base=node)
    (node / "my.toml").write_text(text)
    return load(node / "my.toml", overrides, gpus=8)


def test_the_check_tells_gpu_and_host_memory_apart(node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = memory_line(configured(node, monkeypatch))
    of_gpu, _, of_host = line.partition("; trainer ")
    assert re.search(r"trainer \d\d\.\d GB x 4, rollout \d\d\.\d GB x 4 of GPU memory .*, each GPU has 85\.9 GB; each engine", of_gpu)
    assert "of host memory" in of_host and "are free" in of_host


@pytest.mark.parametrize(
    ("overrides", "who", "advice"),
    [
        (["trainer.gradient_checkpointing=false"], "the trainer needs 1", "set trainer.gradient_checkpointing = true"),
        (["trainer.processes=2", "trainer.gpus=2"], "the trainer needs", "set trainer.processes = 4, trainer.gpus = 4"),
        (
            ["algorithm.kl_coef=0.1", "trainer.zero_stage=3", "trainer.micro_batch_tokens=65536"],
            "the trainer needs",
            "trainer.micro_batch_tokens",
        ),
        (["rollout.vllm.gpu_memory_utilization=0.1"], "a rollout worker needs", "rollout.vllm.tensor_parallel_size"),
        (
            ["trainer.gpus=0", "trainer.processes=1", "trainer.backend=torch", "rollout.gpus_per_worker=0"],
            "the trainer needs",
            "trainer.gpus = ",
        ),
    ],
    ids=["activations", "two GPUs for the trainer", "micro-batches", "the engine's share", "all on one GPU"],
)
def test_the_check_refuses_what_exceeds_a_gpu_with_the_smallest_change_that_fits(
    node: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str], who: str, advice: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        memory_line(configured(node, monkeypatch, *overrides))
    assert str(refused.value).startswith(who) and advice in str(refused.value).partition("); ")[2]


def test_the_advice_fits(node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    single = ["trainer.gpus=1", "trainer.processes=1", "trainer.backend=torch", "rollout.workers=7"]
    with pytest.raises(ConfigError) as refused:
        memory_line(configured(node, monkeypatch, *single))
    advised = re.findall(r'([\w.]+) = ("?\w+"?)', str(refused.value).partition("; set ")[2])
    assert memory_line(load(node / "my.toml", [*single, *map("=".join, advised)], gpus=8))
    assert "trainer.lora_rank" not in dict(advised)


@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize(("name", "gib", "share"), [("0.5B", 80, 0.9), ("7B", 80, 0.6), ("7B", 40, None), ("14B", 80, None)])
def test_an_engine_leaves_room_to_stage_new_weights_if_256_samples_fit_all_the_same(name: str, gib: int, share: float | None) -> None:
    rollout = proposal(name, gpus=8, gib=gib).rollout
    assert rollout.vllm["gpu_memory_utilization"] == (share or UTILIZATION)
    assert share is None or (rollout.concurrency >= 256 and (1 - share) * gib * GIB >= 2 * 2 * COUNTS[name] * 10**6)


def test_a_gpu_whose_memory_is_unknown_is_not_compared(node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configured(node, monkeypatch, "trainer.gradient_checkpointing=false")
    monkeypatch.delenv(MEMORY)
    assert f"the GPU's memory is unknown: set {MEMORY}" in memory_line(config)


def test_what_shares_a_gpu_is_added_up(node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = with_values(configured(node, monkeypatch, "eval.source="), "trainer", gpus=1, processes=1, backend="torch", lora_rank=32)
    lora = with_values(config, "rollout", workers=7)
    assert exceeded(lora, shape("7B"), [80 * GIB] * 8) is None
    unplaced = with_values(with_values(lora, "trainer", gpus=0), "rollout", gpus_per_worker=0, workers=1)
    assert exceeded(unplaced, shape("7B"), [80 * GIB] * 8) is None  # vLLM takes 0.6 of the GPU
    greedy = with_values(unplaced, "rollout", vllm={"gpu_memory_utilization": 0.9})
    excess = exceeded(greedy, shape("7B"), [80 * GIB] * 8)
    assert excess is not None and excess.parts["engines"] == int(0.9 * 80 * GIB)


@pytest.mark.parametrize(("text", "memory"), [("80", 80), ("24.5", 24.5), ("80,80,80", 80)])
def test_the_memory_of_another_machine_is_a_variable(monkeypatch: pytest.MonkeyPatch, text: str, memory: float) -> None:
    monkeypatch.setenv(MEMORY, text)
    assert gpu_memory(("0", "1", "GPU-5a")) == (int(memory * GIB),) * 3


@pytest.mark.parametrize("text", ["80,80", "many", "0", "-1", ",", "inf"])
def test_a_memory_that_is_no_number_for_each_gpu_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(MEMORY, text)
    with pytest.raises(ConfigError, match=f"^{MEMORY}: "):
        gpu_memory(("0", "1", "2"))


@pytest.mark.usefixtures("node", "vllm")
@pytest.mark.costly
def test_init_and_plan_refuse_with_the_same_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--accelerators", "8", "--speed", "1:140,64:7000,256:20000", "--train-speed", "6000", "--lengths", "lognormal:300:0.6:1024"]
    assert cli.main(["plan", "--model", "model", *words, "--prompts-per-step", "8", "--max-lag", "0"]) == OK
    assert "fits into the memory of 3 or 4 or 5 or 6 or 7 accelerators" in " ".join(capsys.readouterr().out.split())
    monkeypatch.setenv(MEMORY, "8")
    refusals = []
    for command in (["plan", "--model", "model", *words], ["init", "--model", "model", "--data", "rows.jsonl", "--reward", "exact_match"]):
        assert cli.main(command) == USAGE
        refusals.append(capsys.readouterr().err.splitlines()[-1].partition(" (")[0])
    assert all(line.startswith("penstock: ") and line.endswith("of its 8.6 GB") for line in refusals), refusals
