"""The protocol of a generation engine: requests, completions, and the declaration of an engine's capabilities.

Each token has the policy version under which it was sampled, and the logprob of the distribution it was sampled from. An engine that
changes weights only between groups is also reproducible: equal (weights, seed, group, sample, prompt, rows, sampling) give bit-identical
tokens and logprobs in any process, independent of earlier groups and of the requested samples.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from penstock.infra.engines.packages import Package
from penstock.infra.errors import EngineError
from penstock.infra.tensors.stream import TensorBytes

Finish = Literal["stop", "length", "abort"]
DIRECTORY_VERSION = -1
"""Version of an engine that has the weights of its model directory, before any were loaded from the log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling parameters; `top_k` 0 and `top_p` 1 are off. The model's generation config is not used."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_new_tokens: int
    stop_ids: tuple[int, ...]
    stop: tuple[str, ...] = field(default=(), repr=False)
    """Texts that end a completion, after the token that completes one of them."""
    greedy: bool = False
    seeded: bool = True
    """True to seed the random generator from the request, so that the completion is reproducible; some engines always do so."""

    @property
    def limited(self) -> bool:
        """True if each token is sampled from at most `top_k` token ids, which the completion then lists as `support`."""
        return self.top_k > 0 and not self.greedy

    def __post_init__(self) -> None:
        """Raise `ValueError` for a parameter outside its range."""
        if not self.greedy and not self.temperature > 0:
            raise ValueError(f"temperature must be above 0, not {self.temperature}; for greedy decoding set greedy")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, not {self.top_p}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (off) or more, not {self.top_k}")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, not {self.max_new_tokens}")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupRequest:
    """A request to sample one prompt: `samples` lists which numbers, of the group's `rows` samples, the engine returns."""

    group: int
    prompt_ids: npt.NDArray[np.int32]
    samples: tuple[int, ...]
    rows: int
    seed: int
    sampling: Sampling
    stream: int | None = None
    """Number that seeds the group's random numbers instead of `group`."""

    @property
    def random_group(self) -> int:
        """Group number that seeds the random numbers."""
        return self.group if self.stream is None else self.stream

    def __post_init__(self) -> None:
        if not len(self.prompt_ids):
            raise ValueError(f"group {self.group}: the prompt is empty")
        if not self.samples or len(set(self.samples)) != len(self.samples) or not all(0 <= s < self.rows for s in self.samples):
            raise ValueError(f"group {self.group}: samples {self.samples} must be one or more distinct numbers from 0 to {self.rows - 1}")


class Span(NamedTuple):
    """Tokens from `start` to the next span were sampled under policy version `version`."""

    version: int
    start: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Completion:
    """One finished sample: `token_ids` include the stop id, `logprobs` are of the sampling distribution (`float32`, nats)."""

    group: int
    sample: int
    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    finish: Finish
    spans: tuple[Span, ...]
    """At least one; the first starts at 0, and none is empty unless the sample is."""
    started_ns: int
    ended_ns: int
    support: npt.NDArray[np.int32] | None = None
    """[T, k] ids that each token was sampled from, padded with -1; a row of -1 if unknown. None unless `Sampling.limited`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupInFlight:
    """Progress of a group in an engine; `tokens` counts all tokens of its requested samples, ended ones included."""

    group: int
    tokens: int
    oldest_version: int | None
    """Oldest policy version of these tokens; None without tokens."""


class Engine(Protocol):
    """Generates groups step by step; the caller runs `step` in a loop and does other work in between."""

    @property
    def version(self) -> int:
        """Policy version of the weights in use, `DIRECTORY_VERSION` before the first `load_weights`."""

    @property
    def pending(self) -> int:
        """Number of groups in flight: submitted and not ended."""

    @property
    def idle(self) -> bool:
        """True if no group is in flight."""

    @property
    def has_room(self) -> bool:
        """True if one more group would start at once, because concurrent samples are free."""

    def submit(self, request: GroupRequest) -> None:
        """Queue a group; lower group numbers are generated first. Raises `EngineError` if the model cannot generate it."""

    def step(self) -> list[Completion]:
        """Generate one token in every running row; return the requested samples that finish with it. No effect if idle."""

    def abort(self, group: int) -> list[Completion]:
        """Abort a group; returns its unfinished requested samples with their tokens so far and finish "abort"."""

    def groups_in_flight(self) -> list[GroupInFlight]:
        """Return the progress of each group in flight, lowest number first."""

    def load_weights(self, version: int, tensors: Iterable[TensorBytes]) -> None:
        """Load all tensors, or none and raise `EngineError`; only while idle unless its kind `swaps_in_flight`."""

    def stats(self) -> dict[str, float]:
        """Return counts and seconds by metric name, since the engine was created."""

    def close(self) -> None:
        """Release the model and drop the groups in flight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Settings of all engines; each uses some of them."""

    directory: Path
    dtype: Literal["float32", "bfloat16"] = "float32"
    float32_head: bool = False
    """Compute logits in float32 where the model is bfloat16."""
    device: str = "auto"
    threads: int = 1
    seed: int = 0
    concurrency: int = 64
    longest: int | None = None
    """Tokens of the longest prompt with its completion, which bound the memory of the KV cache."""
    kv_cache: Literal["recompute", "keep"] = "recompute"
    """Running samples recompute their KV cache after a weight update, or continue on the old one."""
    engine_process: bool = False
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of vLLM's engine."""
    delay_s: float = 0.0
    """Seconds that the toy engine sleeps in each step."""
    top_k: int = 0
    """Largest `Sampling.top_k` of the requests."""
    stops_at_text: bool = False
    """True if requests have `Sampling.stop`."""
    sleeps: bool = False
    """True if the engine shares its device and sleeps at times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineKind:
    """Declaration of an engine: its capabilities and how to open it, readable without importing it."""

    open: Callable[[EngineSettings], Engine]
    """Imports the engine and loads the model. Raises `EngineError`."""
    swaps_in_flight: bool
    """True if weights may be loaded while groups are in flight, whose samples continue under the new weights."""
    sleeps: bool = False
    """True if its engines are `Sleepable`: asleep they have no weights and the version `DIRECTORY_VERSION`, and after waking they need
    weights before they generate."""
    continuous_batching: bool = False
    """True if it fills `concurrency` rows with samples of several groups; False if it generates one group at a time."""
    min_temperature: float = 0.0
    """The engine raises lower temperatures to this one silently, so that their logprobs would be of another distribution."""
    gpus: Callable[[Mapping[str, Any]], int] = lambda _: 1
    """Number of GPUs of one engine with these arguments."""
    gpus_key: str | None = None
    """Setting for the number of GPUs of one engine; None if it is always one."""
    packages: tuple[Package, ...] = ()
    check: Callable[[EngineSettings], None] = lambda _: None
    """Raises `EngineError` for settings that cannot work on this machine, as far as that is known without loading a model."""


def uniforms(*, seed: int, group: int, sample: int, count: int) -> npt.NDArray[np.float64]:
    """Return `count` uniform numbers in [0, 1), one per token of a sample, from a counter-based generator (Philox-4x64)."""
    key = np.array([seed, group], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=[0, 0, 0, sample])).random(count)


def check_tensors(tensors: Iterable[TensorBytes], shapes: Mapping[str, tuple[int, ...]], *, version: int) -> list[TensorBytes]:
    """Return the tensors as a list. Raises `EngineError` unless they are exactly the parameters in `shapes`, with their sizes."""
    weights = list(tensors)
    names = {tensor.name for tensor in weights}
    if len(names) != len(weights):
        raise EngineError(f"weights version {version}: a parameter occurs twice")
    if missing := sorted(shapes.keys() - names):
        raise EngineError(f"weights version {version} lacks parameters such as {missing[0]}: set model.path to the run's model")
    if unknown := sorted(names - shapes.keys()):
        raise EngineError(f"weights version {version} has {unknown[0]}, which the model lacks: set model.path to the run's model")
    for tensor in weights:
        if tuple(tensor.shape) != tuple(shapes[tensor.name]):
            raise EngineError(f"weights version {version}: {tensor.name} has shape {list(tensor.shape)}, not {list(shapes[tensor.name])}")
        if memoryview(tensor.data).nbytes != tensor.nbytes:
            raise EngineError(f"weights version {version}: {tensor.name} has {memoryview(tensor.data).nbytes} bytes, not {tensor.nbytes}")
    return weights
