"""What a processor decides: the trainer's threads are the cores that others leave, and bfloat16 is taken where it is multiplied."""

from pathlib import Path

import pytest

from penstock.infra.backends.processor import Cpu
from penstock.pipeline.config.cpu_defaults import trainer_threads
from penstock.pipeline.config.load import Config, from_json, load, to_json


@pytest.mark.parametrize(
    ("table", "cores", "threads"),
    [
        ({}, 2, 1),
        ({}, 8, 6),
        ({"rollout": {"workers": 1}}, 2, 1),
        ({"rollout": {"workers": 3, "threads": 2}}, 16, 10),
        ({"rollout": {"workers": 8}}, 4, 1),
        ({"schedule": {"mode": "synchronous"}}, 8, 8),
        ({"trainer": {"processes": 3}, "rollout": {"workers": 1}}, 8, 2),
    ],
)
def test_the_trainer_takes_the_cores_that_rollout_workers_leave_or_all_where_they_wait(table: dict, cores: int, threads: int) -> None:
    assert trainer_threads(table, cores=cores) == threads


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

    assert [threads().trainer.threads, threads("threads = 3\n").trainer.threads, threads(gpus=1).trainer.threads] == [14, 3, 1]
