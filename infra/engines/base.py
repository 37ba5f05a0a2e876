"""The protocol of a generation engine: requests, completions, and how an engine declares its capabilities.

The rule: each token is labelled with the policy version it was drawn under, and its logprob is of the distribution it was drawn from. An
engine that changes weights between groups only keeps a stronger one: equal (weights, seed, group, sample, prompt, rows, sampling) give
bit-identical tokens and logprobs, whatever it drew before, in whichever process, whichever of the group's samples are wanted.
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
"""The version of an engine that still has the weights it was made with, before any came from the log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are chosen; `top_k` 0 and `top_p` 1 are off; the model's own generation config never counts."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_new_tokens: int
    stop_ids: tuple[int, ...]
    stop: tuple[str, ...] = field(default=(), repr=False)
    """Texts that end a completion as a stop id does, after the token with which one of them is whole."""
    greedy: bool = False
    seeded: bool = True
    """Whether a sample's random numbers follow from the request; engines that know no other way draw so whatever is asked."""

    @property
    def limited(self) -> bool:
        """Whether each token comes from so few that its completion has them as its `support`."""
        return self.top_k > 0 and not self.greedy

    def __post_init__(self) -> None:
        if not self.greedy and not self.temperature > 0:
            raise ValueError(f"temperature must be above 0, not {self.temperature}; for the likeliest token use greedy")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, not {self.top_p}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (off) or more, not {self.top_k}")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, not {self.max_new_tokens}")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupRequest:
    """One prompt to be sampled: `samples` are the wanted ones of `rows`, which is the whole group's size whatever is wanted."""

    group: int
    prompt_ids: npt.NDArray[np.int32]
    samples: tuple[int, ...]
    rows: int
    seed: int
    sampling: Sampling
    stream: int | None = None
    """The number that stands for the group's in its random numbers, where it is not `group` itself."""

    @property
    def random_group(self) -> int:
        """The group number that its random numbers follow from."""
        return self.group if self.stream is None else self.stream

    def __post_init__(self) -> None:
        if not len(self.prompt_ids):
            raise ValueError(f"group {self.group}: the prompt is empty")
        if not self.samples or len(set(self.samples)) != len(self.samples) or not all(0 <= s < self.rows for s in self.samples):
            raise ValueError(f"group {self.group}: samples {self.samples} must be distinct, at least one, from 0 to {self.rows - 1}")


class Span(NamedTuple):
    """Tokens from `start` on were drawn under policy version `version`, until the next span starts."""

    version: int
    start: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Completion:
    """One sample that ended: `token_ids` include the stop id, `logprobs` are of the distribution drawn from (`float32`, nats)."""

    group: int
    sample: int
    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    finish: Finish
    spans: tuple[Span, ...]
    """At least one; the first starts at 0, none is empty unless the sample is."""
    started_ns: int
    ended_ns: int
    support: npt.NDArray[np.int32] | None = None
    """[T, k] ids of the distribution that each token was drawn from, -1 behind the last; a row of -1 where they are not known. None
    unless `Sampling.limited`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupInFlight:
    """How far an engine is with a group: tokens drawn for its wanted samples, those that ended included."""

    group: int
    tokens: int
    oldest_version: int | None
    """Oldest policy version that any of them was drawn under; None while there is none."""


class Engine(Protocol):
    """Draws groups step by step; its owner calls `step` in a loop and does its own work in between."""

    @property
    def version(self) -> int:
        """Policy version of the weights in use, `DIRECTORY_VERSION` before the first `load_weights`."""

    @property
    def pending(self) -> int:
        """Groups in hand: submitted and not yet ended."""

    @property
    def idle(self) -> bool:
        """True if no group is in hand."""

    @property
    def has_room(self) -> bool:
        """True if one more group would be drawn at once: some of the samples that it draws side by side have ended, or were never begun."""

    def submit(self, request: GroupRequest) -> None:
        """Take a group in hand; lower group numbers are drawn first. Raises `EngineError` if the model cannot draw it."""

    def step(self) -> list[Completion]:
        """Draw one token for every row in work and return the wanted samples that ended with it; nothing in hand, nothing done."""

    def abort(self, group: int) -> list[Completion]:
        """End a group in hand: what is drawn of its wanted samples that have not ended, perhaps nothing, with finish "abort"."""

    def groups_in_flight(self) -> list[GroupInFlight]:
        """The groups in hand, lowest number first."""

    def load_weights(self, version: int, tensors: Iterable[TensorBytes]) -> None:
        """Take all tensors or, with `EngineError`, none; only while idle unless its kind `swaps_in_flight`."""

    def stats(self) -> dict[str, float]:
        """Counts and seconds since the engine was made."""

    def close(self) -> None:
        """Let go of the model; groups in hand are forgotten."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Settings of every engine; each uses those that concern it."""

    directory: Path
    """The model."""
    dtype: Literal["float32", "bfloat16"]
    device: str
    threads: int
    seed: int
    concurrency: int
    """Samples drawn side by side."""
    longest: int
    """Tokens of the longest prompt with its completion."""
    kv_cache: Literal["recompute", "keep"]
    engine_process: bool
    arguments: Mapping[str, Any]
    """vLLM's own arguments."""
    delay_s: float
    """Seconds that the toy engine sleeps for each step."""
    top_k: int = 0
    """The highest that will be asked for."""
    stops_at_text: bool = False
    """Whether `Sampling.stop` will be asked for."""
    sleeps: bool = False
    """Whether the engine will be asked to sleep."""


def _accept(_: EngineSettings) -> None:
    """Nothing can be known to be wrong before the engine is opened."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineKind:
    """An engine's capabilities and how to open it; declared where nothing heavy is imported."""

    open: Callable[[EngineSettings], Engine]
    """Imports the engine and loads the model. Raises `EngineError`."""
    swaps_in_flight: bool
    """True if weights may be loaded while groups are in hand, whose samples then go on under the new ones."""
    sleeps: bool = False
    """True if its engines are `Sleepable`: asleep they have no weights, their version is `DIRECTORY_VERSION`, and once awake they are given
    some before they draw."""
    continuous_batching: bool = False
    """True if it fills `concurrency` rows with samples of several groups; False if it draws one group at a time."""
    min_temperature: float = 0.0
    """Lower temperatures would be raised to this one without a word, and their logprobs would be of another distribution."""
    gpus: Callable[[Mapping[str, Any]], int] = lambda _: 1
    """GPUs that one engine spreads over under these arguments."""
    gpus_key: str | None = None
    """The setting that spreads one engine over several GPUs; None where it computes on one."""
    packages: tuple[Package, ...] = ()
    check: Callable[[EngineSettings], None] = _accept
    """Raises `EngineError` for settings that cannot work on this machine, as far as that shows without loading a model."""


def uniforms(*, seed: int, group: int, sample: int, count: int) -> npt.NDArray[np.float64]:
    """`count` numbers in [0, 1) that belong to this sample alone: one a token, from a counter-based generator (Philox-4x64)."""
    key = np.array([seed, group], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=[0, 0, 0, sample])).random(count)


def check_tensors(tensors: Iterable[TensorBytes], shapes: Mapping[str, tuple[int, ...]], *, version: int) -> list[TensorBytes]:
    """All tensors, when they are exactly the parameters in `shapes`, each of its size; else `EngineError` naming the first that is not."""
    held = list(tensors)
    names = {tensor.name for tensor in held}
    if len(names) != len(held):
        raise EngineError(f"weights version {version}: a parameter comes twice")
    if missing := sorted(shapes.keys() - names):
        raise EngineError(
            f"weights version {version}: {len(missing)} parameters are missing, first {missing[0]}: is model.path the run's model?"
        )
    if unknown := sorted(names - shapes.keys()):
        raise EngineError(f"weights version {version}: the model has no parameter {unknown[0]}: is model.path the run's model?")
    for tensor in held:
        if tuple(tensor.shape) != tuple(shapes[tensor.name]):
            raise EngineError(
                f"weights version {version}: {tensor.name} is {list(tensor.shape)}, the model's is {list(shapes[tensor.name])}"
            )
        if memoryview(tensor.data).nbytes != tensor.nbytes:
            raise EngineError(f"weights version {version}: {tensor.name} has {memoryview(tensor.data).nbytes} bytes, not {tensor.nbytes}")
    return held
