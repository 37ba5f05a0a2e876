"""The protocol of a trainer backend, and how a backend is declared.

The rule: a backend adds up un-normalised gradients, `backward` by `backward`, and `step` divides them once.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from penstock.infra.backends.batch import TokenBatch
from penstock.infra.engines.packages import Package
from penstock.infra.tensors.adapted import Adapted
from penstock.infra.tensors.stream import TensorBytes

LossFunction = Callable[..., tuple[Any, dict[str, float]]]
"""Logprobs, a float32 tensor [B, L-1] (0 where nothing is trained) -> (un-normalised scalar loss sum, statistics). Opened with
`entropy_bonus` a backend gives it the entropies, likewise [B, L-1] and with gradient, as a second argument."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The result of one optimizer step: the norm of the divided gradient before clipping, and the learning rate it used."""

    grad_norm: float
    lr: float
    measures: dict[str, float] = field(default_factory=dict)
    """What else the backend knows of it: `update_norm`, `peak_gpu_bytes`, `model_flops` of its backward passes, `peak_flops` per second."""


class Backend(Protocol):
    """A model with its optimizer, as the trainer uses it."""

    divides_late: bool
    """False: every `backward` must be given the step's `denominator`, so a step starts only when its plan is whole."""
    sharded: bool
    """True: each process holds a part of the weights only, and copying them out is a collective."""
    saves_in_background: bool
    """True: `save` and `export` only read what `step` and `load` change, so that a thread may run them beside `backward`."""
    steps: int
    """Optimizer steps taken so far; sets the learning rate."""

    def backward(self, batch: TokenBatch, loss_fn: LossFunction, *, denominator: float | None = None) -> dict[str, float]:
        """Add the gradient of one micro-batch's loss sum.

        Returns `loss_sum` (undivided), `tokens` (trained), `computed_tokens` (that ran through the model), and `loss_fn`'s statistics.
        """
        ...

    def step(self, *, denominator: float) -> StepResult:
        """Divide the gradient sum once by the step's count, clip, update the weights, forget the gradients."""
        ...

    def logprobs(self, batch: TokenBatch) -> npt.NDArray[np.float32]:
        """[B, L-1] log-probabilities under the current weights, 0 where nothing is trained."""
        ...

    def reference_logprobs(self, batch: TokenBatch) -> npt.NDArray[np.float32]:
        """[B, L-1] log-probabilities under version 0, 0 where nothing is trained; needs `reference=True`."""
        ...

    def take_snapshot(self, tensors: Iterable[TensorBytes] | None = None) -> None:
        """Make the current weights, or these, the proximal policy of the steps to come; needs `snapshot=True`."""
        ...

    def snapshot_logprobs(self, batch: TokenBatch) -> npt.NDArray[np.float32]:
        """[B, L-1] log-probabilities under the weights of `take_snapshot`, 0 where nothing is trained."""
        ...

    def weights(self) -> list[TensorBytes]:
        """A copy of the full, unsharded weights under the names of `model.named_parameters()`, tied ones once."""
        ...

    def adapted(self) -> Adapted | None:
        """The weights that `weights` gives as adapters and the weights below them; None where the weights themselves are trained."""
        ...

    def load_weights(self, tensors: Iterable[TensorBytes]) -> None:
        """Replace all weights, or none; the optimizer's moments stay."""
        ...

    def save(self, directory: str | Path) -> None:
        """Write weights, optimizer, step count and random state into `directory`; the caller makes it durable. Raises `OSError`."""
        ...

    def load(self, directory: str | Path) -> None:
        """Restore exactly the state that `save` wrote."""
        ...

    def export(self, directory: str | Path, tensors: Iterable[TensorBytes]) -> None:
        """Write these weights, which `weights` has given, and the tokenizer in Hugging Face format."""
        ...

    def fingerprint(self) -> dict[str, str | int]:
        """Versions, device, threads and settings on which the last bits of the arithmetic depend."""
        ...

    def close(self) -> None:
        """Release the model and its resources."""
        ...


def _accept(_: Mapping[str, Any]) -> str | None:
    """Accept any settings."""
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendKind:
    """Declares how a backend is opened and what it needs, without importing it."""

    open: Callable[..., Backend]
    """Imports the backend; takes the fields of `BackendSettings`, and `own`."""
    own: tuple[str, ...] = ()
    """Keys of the config section `trainer` that only this backend takes."""
    check: Callable[[Mapping[str, Any]], str | None] = _accept
    """Takes the config section `trainer`; returns one line about values that contradict each other, else None."""
    packages: tuple[Package, ...] = ()
    sleeps: bool = False
    """True if its backends are `Sleepable`: asleep, between two steps, their state lies on the host, and can be read and saved there."""
