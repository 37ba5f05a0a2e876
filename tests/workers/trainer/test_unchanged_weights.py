"""Engine and trainer at the same weights: no loss loses samples to what the two round differently, as its defaults are."""

import json
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from penstock.infra.engines.base import Completion, GroupRequest, Sampling
from penstock.pipeline.algorithms.registry import LOSSES
from penstock.pipeline.config.run_config import Config
from penstock.pipeline.learner.micro_batches import pack
from penstock.pipeline.learner.train_step import Objective, Step
from penstock.pipeline.runtime.factories import make_backend, make_engine
from penstock.pipeline.scheduling.rules import MODES
from penstock.topics.groups import Group
from tests.support.trainer_alone import PROMPT, SAMPLES, config_for, group_of

torch = pytest.importorskip("torch")

from benchmarks.at_unchanged_weights import AT_LEAST_ESS, AT_MOST_LOST, measured  # noqa: E402

GROUPS, TOKENS, TEMPERATURE = 4, 64, 0.7
LOGITS = 2.0
"""Their standard deviation."""


def config_of(model: Path, directory: Path, dtype: str, *, mode: str = "one_step_off", per_version: int = 1, **algorithm: str) -> Config:
    return config_for(
        model,
        directory,
        algorithm=algorithm,
        rollout={"engine": "vllm" if mode in ("in_flight", "bounded") else "transformers", "dtype": dtype, "device": "cpu"},
        sampling={"max_new_tokens": TOKENS, "temperature": TEMPERATURE},
        schedule={"mode": mode, "steps_per_version": per_version},
        trainer={"dtype": "float32", "device": "cpu", "micro_batch_tokens": 200},
    )


def completions(config: Config) -> Iterator[Completion]:
    """What the engine draws, no sample of it ended by a token."""
    engine = make_engine(config)
    sampling = Sampling(max_new_tokens=TOKENS, temperature=TEMPERATURE, stop_ids=())
    for number in range(GROUPS):
        samples = tuple(range(SAMPLES))
        engine.submit(GroupRequest(group=number, prompt_ids=PROMPT, samples=samples, rows=SAMPLES, seed=0, sampling=sampling))
    left = GROUPS * SAMPLES
    while left:
        for completion in engine.step():
            left -= 1
            yield completion
    with suppress(RuntimeError):
        engine.close()


@dataclass(frozen=True)
class Drawn:
    """Samples of the engine."""

    model: Path
    dtype: str
    """In which the engine computes; the trainer computes in float32."""
    groups: list[Group]
    logprobs: npt.NDArray[np.float32]
    """[B, L-1] of all samples, by the trainer."""


@pytest.fixture(scope="module")
def decided_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with larger logits: one that finds all tokens equally likely hides most of what can go wrong."""
    from safetensors.torch import load_file, save_file

    directory = tmp_path_factory.mktemp("decided") / "model"
    shutil.copytree(tiny_model, directory)
    tensors = load_file(directory / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].shape
    tensors["lm_head.weight"] = LOGITS / head[1] ** 0.5 * torch.randn(head, generator=torch.Generator().manual_seed(0))
    settings = json.loads((directory / "config.json").read_text(encoding="utf-8")) | {"tie_word_embeddings": False}
    (directory / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.fixture(scope="module", params=[pytest.param("float32", marks=pytest.mark.slow), "bfloat16"], ids="engine in {}".format)
def drawn(request: pytest.FixtureRequest, decided_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Drawn:
    directory = tmp_path_factory.mktemp("drawn")
    config = config_of(decided_model, directory, request.param, per_version=2, proximal="snapshot")
    found = {(one.group, one.sample): one for one in completions(config)}

    def scored(number: int) -> Group:
        group, samples = group_of(number, version=0, tokens=TOKENS), []
        for sample in group.samples:
            one = found[number, sample.rollout.sample]
            taken = replace(sample.rollout, token_ids=one.token_ids, behaviour_logprobs=one.logprobs, temperature=TEMPERATURE)
            samples.append(replace(sample, rollout=taken))
        return replace(group, samples=tuple(samples))

    groups, backend = [scored(number) for number in range(GROUPS)], make_backend(config, steps=1)
    sequences = [sequence for group in groups for sequence in Objective.of(config).sequences(group)]
    logprobs = np.concatenate([backend.snapshot_logprobs(pack([sequence])) for sequence in sequences])
    backend.close()
    return Drawn(decided_model, request.param, groups, logprobs)


@pytest.mark.parametrize("loss", LOSSES)
def test_a_step_keeps_every_sample_and_has_a_gradient(tmp_path: Path, drawn: Drawn, loss: str) -> None:
    config = config_of(drawn.model, tmp_path, drawn.dtype, loss=loss)
    backend = make_backend(config, steps=1)
    step = Step(backend, Objective.of(config), number=0)
    for group in drawn.groups:
        step.add(group)
    metrics = step.finish(learner_version=0).metrics
    backend.close()
    assert metrics["tokens"] == GROUPS * SAMPLES * TOKENS
    assert metrics["ess"] >= AT_LEAST_ESS
    assert max(metrics["clip_fraction"], metrics.get("corrected_fraction", 0.0)) <= AT_MOST_LOST
    assert metrics["grad_norm"] > 0.0


@pytest.mark.parametrize("per_version", [1, 4])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("loss", LOSSES)
def test_no_default_of_a_loss_takes_the_gradient_from_tokens(tmp_path: Path, drawn: Drawn, loss: str, mode: str, per_version: int) -> None:
    config = config_of(drawn.model, tmp_path, drawn.dtype, mode=mode, per_version=per_version, loss=loss)
    objective = Objective.of(config)
    batch = pack([sequence for group in drawn.groups for sequence in objective.sequences(group)])
    ess, *lost = measured(config, batch, drawn.logprobs)
    assert ess >= AT_LEAST_ESS
    assert max(lost) <= AT_MOST_LOST, "without gradient, clipped, cut or masked"
