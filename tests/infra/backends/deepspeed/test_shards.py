"""A checkpoint of DeepSpeed is read by other numbers of processes than wrote it."""

import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.infra.backends.registry import open_backend
from penstock.infra.errors import BackendError
from penstock.infra.tensors.stream import digest
from penstock.infra.tensors.torch_copy import from_bytes
from tests.support.together import together
from tests.support.training import batch_of, loss_of, save_tiny_model

STAGES: list[dict[str, Any]] = [{"zero_stage": stage} for stage in range(4)]
CUT = {"zero_stage": 3, "deepspeed_config": {"zero_optimization": {"stage3_param_persistence_threshold": 0, "sub_group_size": 3000}}}
"""Every weight is divided, and the masters lie in several groups."""
OTHERS: list[dict[str, Any]] = [
    *({"zero_stage": stage, "dtype": "bfloat16"} for stage in (2, 3)),
    CUT,
    {"zero_stage": 2, "lora_rank": 4},
    *({"zero_stage": stage, "offload": "optimizer"} for stage in (1, 3)),
    {"zero_stage": 2, "deepspeed_config": {"zero_optimization": {"round_robin_gradients": True}}},
]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"), intermediate_size=50)


def opened(model_path: str, own: dict[str, Any], **changed: Any) -> Any:
    return open_backend("deepspeed", **{"model_path": model_path, "lr": 1e-2, "weight_decay": 0.1, **own, **changed})


def step(backend: Any, number: int, size: int) -> tuple[float, float]:
    """Every process adds the same gradient, which the division by their number makes the step of one process."""
    batch = batch_of(number)
    loss = backend.backward(batch, loss_of(batch))["loss_sum"]
    return loss, backend.step(denominator=float(batch.tokens * size)).grad_norm


def state_of(backend: Any) -> dict[str, Any]:
    """Weights, masters and moments as DeepSpeed itself puts them together, step count, and torch's random numbers."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    found = {f"weight {tensor.name}": from_bytes(tensor).float().numpy() for tensor in backend.weights()}
    found |= {"steps": backend.steps, "random": torch.get_rng_state().numpy()}
    if not backend.zero_stage:
        parameters = [parameter for group in backend.optimizer.param_groups for parameter in group["params"]]
        for number, state in enumerate(map(backend.optimizer.state.get, parameters)):
            found |= {f"{kind} {number}": state[kind].numpy().copy() for kind in ("exp_avg", "exp_avg_sq", "step")}
        return found
    if backend.zero_stage < 3:
        backend.optimizer._hp_optimizer_states_linked = False  # DeepSpeed has linked them before the first step made any
        backend.optimizer._lazy_init_hp_params_optimizer_state()
    for name, parameter in backend.model.named_parameters():
        if parameter.requires_grad:
            found[f"master {name}"] = safe_get_full_fp32_param(parameter).numpy().copy()
            for kind in ("exp_avg", "exp_avg_sq"):
                found[f"{kind} {name}"] = safe_get_full_optimizer_state(parameter, kind).numpy().copy()
    steps = {float(state["step"]) for state in backend.optimizer.optimizer.state.values()}
    return found | {"optimizer steps": sorted(steps)}


def write(model_path: str, cases: list[dict[str, Any]], directory: Path, size: int) -> list[Any]:
    results = []
    for number, own in enumerate(cases):
        backend = opened(model_path, own)
        for at in range(2):
            step(backend, at, size)
        torch.rand(3)
        backend.save(directory / str(number))
        results.append((state_of(backend), step(backend, 2, size)))
        backend.close()
    return results


def read(model_path: str, cases: list[dict[str, Any]], directory: Path, size: int) -> list[Any]:
    results = []
    for number, own in enumerate(cases):
        backend = opened(model_path, own)
        backend.load(directory / str(number))
        results.append((state_of(backend), step(backend, 2, size)))
        backend.close()
    return results


def check(written: list[Any], found: list[Any], cases: list[dict[str, Any]]) -> None:
    for own, (expected, following), (state, next_step) in zip(cases, written, found, strict=True):
        assert state.keys() == expected.keys()
        for name, value in expected.items():
            np.testing.assert_array_equal(state[name], value, err_msg=f"{own}: {name}")
        rounding = 1e-3 if own.get("dtype") == "bfloat16" else 1e-5
        np.testing.assert_allclose(next_step, following, rtol=rounding, err_msg=str(own))


@pytest.mark.slow
def test_what_two_processes_wrote_is_read_by_one_bit_for_bit(model_path: str, tmp_path: Path) -> None:
    cases = STAGES[2:3]
    written = together(2, write, model_path, cases, tmp_path, 2)[0]
    check(written, read(model_path, cases, tmp_path, 1), cases)
    with pytest.raises(BackendError, match="was saved for a model with other parameters"):
        opened(model_path, STAGES[2], lora_rank=4).load(tmp_path / "0")


@pytest.mark.slow
@pytest.mark.parametrize(("writers", "readers"), [(2, 3), (3, 2), (1, 3)])
def test_any_number_of_processes_reads_what_any_other_wrote(model_path: str, tmp_path: Path, writers: int, readers: int) -> None:
    cases = [*STAGES, *OTHERS]
    written = together(writers, write, model_path, cases, tmp_path, writers)
    for found in together(readers, read, model_path, cases, tmp_path, readers):
        check(written[0], found, cases)


@pytest.mark.parametrize("stage", range(4))
def test_a_state_from_before_the_first_step_has_no_moments_and_is_read(model_path: str, tmp_path: Path, stage: int) -> None:
    before, after = opened(model_path, STAGES[stage]), opened(model_path, STAGES[stage])
    before.save(tmp_path / "0")
    step(after, 1, 1)
    after.load(tmp_path / "0")
    assert [step(after, number, 1) for number in range(2)] == [step(before, number, 1) for number in range(2)]
    assert digest(after.weights()) == digest(before.weights())


@pytest.mark.parametrize("own", [STAGES[0], STAGES[2], STAGES[3], CUT], ids=["ZeRO-0", "ZeRO-2", "ZeRO-3", "ZeRO-3, all divided"])
def test_a_loaded_optimizer_keeps_the_settings_of_its_own_run(model_path: str, tmp_path: Path, own: dict[str, Any]) -> None:
    before = opened(model_path, own)
    step(before, 0, 1)
    before.save(tmp_path / "0")
    after = opened(model_path, own, betas=(0.5, 0.6), weight_decay=0.3, max_grad_norm=0.25)
    settings = [{name: value for name, value in group.items() if name not in ("params", "lr")} for group in after.optimizer.param_groups]
    after.load(tmp_path / "0")
    assert [{name: group[name] for name in kept} for group, kept in zip(after.optimizer.param_groups, settings, strict=True)] == settings
    assert after.zero_stage == 0 or after.optimizer.clip_grad == 0.25


@pytest.mark.parametrize("stage", [1, 2])
def test_a_closed_backend_frees_its_masters(model_path: str, stage: int) -> None:
    backend = opened(model_path, {"zero_stage": stage})
    step(backend, 0, 1)
    masters = [weakref.ref(master) for master in backend.optimizer.single_partition_of_fp32_groups]
    assert masters
    backend.close()
    assert [master() for master in masters] == [None] * len(masters)
