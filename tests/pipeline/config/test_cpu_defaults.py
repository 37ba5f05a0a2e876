"""What a processor decides: the trainer's threads, together with the model's size and never the schedule, and its number format."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from penstock.infra.backends.hardware import Cpu
from penstock.pipeline.config.load import Config, from_json, load, to_json, trainer_threads, with_cpu_defaults
from penstock.pipeline.scheduling.rules import MODES


@pytest.mark.parametrize(
    ("parameters", "cores", "processes", "threads"),
    [
        (9_999_999, 64, 1, 1),
        (0, 2, 1, 1),
        (10_000_000, 8, 1, 4),
        (135_000_000, 2, 1, 1),
        (135_000_000, 1, 1, 1),
        (135_000_000, 16, 3, 2),
        (135_000_000, 8, 0, 4),  # refused later
        (None, 8, 1, 4),
    ],
)
def test_a_small_model_gets_one_thread_and_another_half_of_the_cores(
    parameters: int | None, cores: int, processes: int, threads: int
) -> None:
    assert trainer_threads(parameters=parameters, cores=cores, processes=processes) == threads


def model_of(directory: Path, **shapes: list[int]) -> str:
    """A model of two files whose tensors have these shapes."""
    for number, part in enumerate((list(shapes)[::2], list(shapes)[1::2])):
        save_file({name: np.zeros(shapes[name], np.uint8) for name in part}, directory / f"model-{number}.safetensors")
    return str(directory)


def table_of(model: str, *, mode: str = "pipelined", workers: int = 2, threads: int = 1) -> dict:
    return {"model": {"path": model}, "schedule": {"mode": mode}, "rollout": {"workers": workers, "threads": threads}}


@pytest.mark.parametrize(("side", "threads"), [(1_000, 1), (3_000, 8)])
def test_neither_the_schedule_nor_the_number_of_rollout_workers_decides_on_threads(tmp_path: Path, side: int, threads: int) -> None:
    model = model_of(tmp_path, a=[side, side], b=[side, side], c=[3])
    tables = [table_of(model), *(table_of(model, mode=mode) for mode in MODES), table_of(model, workers=4), table_of(model, threads=3)]
    cpu = Cpu(cores=16, bfloat16=False)
    assert {with_cpu_defaults(table, cpu=cpu, on_gpu=False)["trainer"]["threads"] for table in tables} == {threads}


@pytest.mark.parametrize("content", [b"", b"12345678", b"\x02\0\0\0\0\0\0\0[]", b'\x07\0\0\0\0\0\0\0{"a":1}', b"\xff" * 20])
def test_a_broken_model_file_is_left_to_be_refused_with_the_rest(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    filled = with_cpu_defaults(table_of(str(tmp_path)), cpu=Cpu(cores=8, bfloat16=False), on_gpu=False)
    assert filled["trainer"]["threads"] == 4


def written(directory: Path, more: str = "") -> Path:
    file = directory / "run.toml"
    file.write_text(f'[run]\nsteps = 1\n[model]\npath = "m"\n[data]\nsource = "d.jsonl"\n[trainer]\n{more}')
    return file


@pytest.mark.parametrize(
    ("cpu", "gpus", "dtype"), [(None, 0, "float32"), (False, 0, "float32"), (True, 0, "bfloat16"), (False, 1, "bfloat16")]
)
def test_auto_becomes_the_format_that_the_device_multiplies_and_stands_in_the_record(
    tmp_path: Path, cpu: bool | None, gpus: int, dtype: str
) -> None:
    read = load(written(tmp_path, 'dtype = "auto"\n'), gpus=gpus, cpu=None if cpu is None else Cpu(cores=4, bfloat16=cpu))
    assert read.trainer.dtype == dtype
    assert from_json(to_json(read)) == read


def test_threads_that_a_person_chose_stand_and_on_a_gpu_none_are_chosen(tmp_path: Path) -> None:
    cpu = Cpu(cores=16, bfloat16=True)

    def threads(more: str = "", **machine: int) -> Config:
        return load(written(tmp_path, more), cpu=cpu, **machine)

    assert [threads().trainer.threads, threads("threads = 3\n").trainer.threads, threads(gpus=1).trainer.threads] == [8, 3, 1]


@pytest.mark.parametrize(("more", "threads"), [("", 1), ('backend = "deepspeed"\noffload = "optimizer"\n', 8), ("threads = 2\n", 2)])
def test_an_optimizer_on_the_host_beside_a_gpu_computes_with_all_cores_of_its_process(tmp_path: Path, more: str, threads: int) -> None:
    read = load(written(tmp_path, f"processes = 2\n{more}"), gpus=2, cpu=Cpu(cores=16, bfloat16=True))
    assert read.trainer.threads == threads
