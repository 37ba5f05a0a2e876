"""The protocol of a trainer backend, its input, and the declaration of a backend."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from penstock.infra.engines.packages import Package
from penstock.infra.tensors.adapted import Adapted
from penstock.infra.tensors.stream import TensorBytes


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBatch:
    """B sequences of at most L tokens; values per token are aligned to *next-token positions*: column t belongs to token t + 1."""

    input_ids: npt.NDArray[np.int64]
    """[B, L] prompt, completion, zero padding."""
    attention_mask: npt.NDArray[np.bool_]
    """[B, L] True on real tokens."""
    completion_mask: npt.NDArray[np.bool_]
    """[B, L-1] True where token t + 1 is a completion token that is trained."""
    behaviour_logprobs: npt.NDArray[np.float32]
    """[B, L-1] logprob with which token t + 1 was sampled; 0 outside `completion_mask`."""
    advantages: npt.NDArray[np.float32]
    temperatures: npt.NDArray[np.float32]
    """[B] sampling temperatures, by which the learner's logits are divided."""
    groups: npt.NDArray[np.int64]
    """[B] group number of each row."""
    samples: npt.NDArray[np.int64]
    """[B] sample number of each row within its group."""
    sample_tokens: npt.NDArray[np.int64] | None = None
    """[B] trained tokens of the full sample of each row; None if every row is a full sample."""
    support: npt.NDArray[np.int32] | None = None
    """[B, L-1, k] ids that token t + 1 was sampled from, itself included, padded with -1; None: the full vocabulary."""

    @property
    def tokens(self) -> int:
        return int(self.completion_mask.sum())

    def logit_columns(self) -> npt.NDArray[np.int64]:
        """Return the columns of the L-1 next-token positions that any row trains; at least one, so that each batch has a loss."""
        columns: npt.NDArray[Any] = np.flatnonzero(self.completion_mask.any(axis=0))
        return columns if len(columns) else np.zeros(1, np.int64)


LossFunction = Callable[..., tuple[Any, dict[str, float]]]
"""Logprobs, a float32 tensor [B, L-1] (0 on untrained tokens) -> (un-normalised scalar loss sum, statistics). With `entropy_bonus` a
backend passes `entropies`, with `value_lr` the `values` of its value head; both are [B, L-1] with gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Result of one optimizer step: the norm of the divided gradient before clipping, and the learning rate."""

    grad_norm: float
    lr: float
    measures: dict[str, float] = field(default_factory=dict)
    """Backend-specific: `update_norm`, `peak_gpu_bytes`, `model_flops` of the backward passes, `peak_flops` per second."""


class Backend(Protocol):
    """A model with its optimizer, as the trainer uses it."""

    divides_late: bool
    """False if every `backward` needs the step's `denominator`, so that a step starts only when all its groups are there."""
    shares_prompts: bool
    """True if prefixes that rows of a micro-batch have in common are computed once, and padding is not."""
    sharded: bool
    """True if each process holds only a part of the weights, so that copying them out is a collective."""
    saves_in_background: bool
    """True if `save` and `export` only read state that `step` and `load` change and every process has, so that one process may run them
    in a thread during `backward`."""
    steps: int
    """Optimizer steps taken so far; sets the learning rate."""

    def backward(self, batch: TokenBatch, loss_fn: LossFunction, *, denominator: float | None = None) -> dict[str, float]:
        """Add the gradient of one micro-batch's loss sum.

        Returns `loss_sum` (undivided), `tokens` (trained), `computed_tokens` (passed through the model), and `loss_fn`'s statistics.
        """

    def step(self, *, denominator: float) -> StepResult:
        """Divide the gradient sum by `denominator`, clip it, update the weights and clear the gradients.

        Raises `BackendError` and leaves the weights unchanged if the gradient is not finite.
        """

    def logprobs(self, batch: TokenBatch) -> npt.NDArray[np.float32]:
        """[B, L-1] logprobs under the current weights, 0 on untrained tokens."""

    def reference_logprobs(self, batch: TokenBatch) -> npt.NDArray[np.float32]:
        """[B, L-1] logprobs under version 0 or the reference model, 0 on untrained tokens; needs `reference=True`."""

    def take_snapshot(self, tensors: Iterable[TensorBytes] | None = None) -> None:
        """Make the current weights, or `tensors`, the proximal policy of the next steps (arXiv 2505.24298); needs `snapshot=True`."""

    def snapshot_logprobs(self, batch: TokenBatch) -> npt.NDArray[np.float32]:
        """[B, L-1] logprobs under the weights of `take_snapshot`, 0 on untrained tokens."""

    def weights(self) -> Sequence[TensorBytes]:
        """A copy of the full, unsharded weights under the names of `model.named_parameters()`, tied ones once."""

    def adapted(self) -> Adapted | None:
        """The weights as adapters and their frozen base; None if no adapters are trained."""

    def load_weights(self, tensors: Iterable[TensorBytes]) -> None:
        """Replace all weights, or none on an error; the optimizer's moments stay."""

    def save(self, directory: str | Path) -> None:
        """Write weights, optimizer, step count and random state into `directory`; the caller flushes it. Raises `OSError`."""

    def load(self, directory: str | Path) -> None:
        """Restore exactly the state that `save` wrote. Raises `BackendError`."""

    def export(self, directory: str | Path, tensors: Iterable[TensorBytes]) -> None:
        """Write `tensors`, as returned by `weights`, and the tokenizer in Hugging Face format."""

    def fingerprint(self) -> dict[str, str | int]:
        """Package versions, device, threads and settings on which the last bits of the results depend."""

    def close(self) -> None:
        """Release the model and its resources."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendKind:
    """Declaration of a backend, readable without importing it."""

    open: Callable[..., Backend]
    """Imports the backend; takes the fields of `BackendSettings`, and `own`."""
    own: tuple[str, ...] = ()
    """Keys of the config section `trainer` that only this backend takes."""
    check: Callable[[Mapping[str, Any]], str | None] = lambda _: None
    """Takes the config section `trainer`; returns one line about contradicting values, else None."""
    packages: tuple[Package, ...] = ()
    value_head: bool = False
    """True if its backends can train a value head."""
    sleeps: bool = False
    """True if its backends are `Sleepable`: while asleep, between two steps, their state is in host memory and can be read and saved."""
