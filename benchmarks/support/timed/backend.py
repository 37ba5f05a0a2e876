"""A trainer backend that takes the time of a paper's for each token and sample, and changes one weight in a hundred at each step.

Losses, statistics, digests, deltas and the ledger are real, on the weights of a small model and at ratios of one.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.support.timed.stages import Pause, Stages
from penstock.infra.backends.base import BackendKind, LossFunction, StepResult, TokenBatch
from penstock.infra.errors import BackendError
from penstock.infra.tensors.adapted import Adapted
from penstock.infra.tensors.stream import TensorBytes

CHANGED = 0.01
"""Share of the weights that a step changes, as bfloat16 weights do under the learning rates of post-training."""


class TimedBackend:
    """The weights of a model directory, and times."""

    divides_late, shares_prompts, sharded, saves_in_background = True, False, False, False

    def __init__(self, stages: Stages, *, model_path: str, lr: float) -> None:
        from safetensors.numpy import load_file

        self._stages, self._pause, self._lr, self.steps = stages, Pause(stages.speed_up), lr, 0
        self._weights: dict[str, npt.NDArray[Any]] = {
            name: array.copy() for name, array in load_file(Path(model_path) / "model.safetensors").items()
        }

    def backward(self, batch: TokenBatch, loss_fn: LossFunction, *, denominator: float | None = None) -> dict[str, float]:
        import torch

        del denominator
        loss, stats = loss_fn(torch.from_numpy(batch.behaviour_logprobs))
        seconds = self._stages.train_token_s * batch.tokens + self._stages.train_sample_s * len(batch.groups)
        self._pause.sleep(seconds)
        tokens = float(batch.tokens)
        return {"loss_sum": float(loss), "tokens": tokens, "computed_tokens": tokens, **stats}

    def step(self, *, denominator: float) -> StepResult:
        del denominator
        random = np.random.default_rng((self._stages.seed, self.steps))
        for array in self._weights.values():
            flat = array.reshape(-1)
            flat[random.integers(0, flat.size, max(1, int(flat.size * CHANGED)))] += self._lr
        self.steps += 1
        self._pause.sleep(self._stages.step_s)
        return StepResult(grad_norm=1.0, lr=self._lr)

    def logprobs(self, batch: TokenBatch) -> npt.NDArray[np.float32]:
        return batch.behaviour_logprobs

    reference_logprobs = snapshot_logprobs = logprobs

    def take_snapshot(self, tensors: Iterable[TensorBytes] | None = None) -> None:
        """The policies are one."""

    def weights(self) -> Sequence[TensorBytes]:
        self._pause.sleep(self._stages.publish_s)
        return [
            TensorBytes(name=name, dtype="float32", shape=array.shape, data=array.astype("<f4").tobytes())
            for name, array in sorted(self._weights.items())
        ]

    def adapted(self) -> Adapted | None:
        return None

    def load_weights(self, tensors: Iterable[TensorBytes]) -> None:
        for tensor in tensors:
            self._weights[tensor.name] = np.frombuffer(tensor.data, "<f4").reshape(tensor.shape).copy()

    def save(self, directory: str | Path) -> None:
        raise BackendError(f"timed stages write no checkpoint to {directory}: set trainer.checkpoint_every = 0")

    def load(self, directory: str | Path) -> None:
        raise BackendError(f"timed stages read no checkpoint in {directory}")

    def export(self, directory: str | Path, tensors: Iterable[TensorBytes]) -> None:
        raise BackendError(f"timed stages export nothing to {directory}: set trainer.export = false")

    def fingerprint(self) -> dict[str, str | int]:
        return {"backend": "timed", "speed_up": str(self._stages.speed_up)}

    def close(self) -> None:
        self._weights.clear()


def kind(stages: Stages) -> BackendKind:
    """The backend for the registry."""
    return BackendKind(open=lambda **settings: TimedBackend(stages, model_path=settings["model_path"], lr=settings["lr"]))
