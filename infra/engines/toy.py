"""An engine without a model: pseudo-random completions at a configured speed, for tests and benchmarks of the rest."""

import hashlib
import heapq
import time
from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt

from penstock.infra.engines.base import (
    DIRECTORY_VERSION,
    Completion,
    EngineKind,
    Finish,
    GroupInFlight,
    GroupRequest,
    Span,
    check_tensors,
    uniforms,
)
from penstock.infra.tensors.stream import TensorBytes, digest


class ToyEngine:
    """Generates up to `capacity` groups concurrently; a step takes `delay_s`.

    Lengths are uniform from 1 to `max_new_tokens`, tokens uniform over `vocabulary` ids. The parameters' names and shapes are `parameters`
    or, without it, those of the first loaded weights.
    """

    def __init__(
        self, *, vocabulary: int = 100, delay_s: float = 0.0, capacity: int = 1, parameters: Mapping[str, tuple[int, ...]] | None = None
    ) -> None:
        self._capacity = capacity
        self.version = DIRECTORY_VERSION
        self._vocabulary, self._delay_s = vocabulary, delay_s
        self._shapes = None if parameters is None else dict(parameters)
        self._salt = b""
        self._waiting: list[tuple[int, int, GroupRequest]] = []
        self._running: list[_Group] = []
        self._submitted = 0
        self._stats = {"groups": 0.0, "tokens": 0.0, "decode_steps": 0.0, "busy_s": 0.0, "loads": 0.0}

    @property
    def pending(self) -> int:
        return len(self._waiting) + len(self._running)

    @property
    def idle(self) -> bool:
        return not self.pending

    @property
    def has_room(self) -> bool:
        return self.pending < self._capacity

    def submit(self, request: GroupRequest) -> None:
        self._submitted += 1
        heapq.heappush(self._waiting, (request.group, self._submitted, request))

    def step(self) -> list[Completion]:
        """Start waiting groups, return the samples that end with the next token of all running groups; sleeps `delay_s`."""
        while self._waiting and len(self._running) < self._capacity:
            self._running.append(self._start(heapq.heappop(self._waiting)[2]))
        if not self._running:
            return []
        if self._delay_s:
            time.sleep(self._delay_s)
        ended = [completion for group in self._running for completion in group.step(self.version)]
        self._stats["decode_steps"] += 1
        self._stats["busy_s"] += self._delay_s
        self._stats["tokens"] += sum(len(completion.token_ids) for completion in ended)
        self._stats["groups"] += sum(not group.unended for group in self._running)
        self._running = [group for group in self._running if group.unended]
        return ended

    def abort(self, group: int) -> list[Completion]:
        """Abort a group; return its unfinished requested samples with their tokens so far and finish "abort"."""
        aborted = [running for running in self._running if running.request.group == group]
        aborted += [self._start(request) for number, _, request in self._waiting if number == group]
        self._waiting = [entry for entry in self._waiting if entry[0] != group]
        heapq.heapify(self._waiting)
        self._running = [running for running in self._running if running.request.group != group]
        return [completion for running in aborted for completion in running.aborted()]

    def groups_in_flight(self) -> list[GroupInFlight]:
        groups = [GroupInFlight(group=group, tokens=0, oldest_version=None) for group, _, _ in self._waiting]
        groups += [
            GroupInFlight(group=group.request.group, tokens=group.tokens, oldest_version=group.spans[0].version if group.steps else None)
            for group in self._running
        ]
        return sorted(groups, key=lambda progress: progress.group)

    def load_weights(self, version: int, tensors: Iterable[TensorBytes]) -> None:
        weights = list(tensors)
        shapes = self._shapes or {tensor.name: tuple(tensor.shape) for tensor in weights}
        self._salt = digest(check_tensors(weights, shapes, version=version), "sha256").encode()
        self._shapes, self.version = shapes, version
        self._stats["loads"] += 1

    def sleep(self) -> None:
        assert self.idle, "an engine with groups in flight does not sleep"
        self.version = DIRECTORY_VERSION

    def wake(self) -> None:
        """No effect, because `sleep` frees nothing."""

    def stats(self) -> dict[str, float]:
        return dict(self._stats)

    def close(self) -> None:
        self._waiting.clear()
        self._running.clear()

    def _start(self, request: GroupRequest) -> "_Group":
        return _Group(request, vocabulary=self._vocabulary, salt=self._salt, version=self.version)


class _Group:
    """One running group: its samples are computed at its start and returned step by step."""

    def __init__(self, request: GroupRequest, *, vocabulary: int, salt: bytes, version: int) -> None:
        self.request, self.steps, self.started_ns = request, 0, time.time_ns()
        self.spans = [Span(version, 0)]
        self.ended_tokens = 0
        prompt = np.ascontiguousarray(request.prompt_ids, dtype="<i4").tobytes()
        base = hashlib.sha256(salt + prompt + repr(request.sampling).encode()).digest()
        self.unended = {sample: _generate(request, sample, int.from_bytes(base[:7], "little"), vocabulary) for sample in request.samples}

    @property
    def tokens(self) -> int:
        return self.ended_tokens + self.steps * len(self.unended)

    def step(self, version: int) -> list[Completion]:
        """Advance all samples by one token under `version`; return those that end."""
        if version != self.spans[-1].version:
            self.spans = [span for span in self.spans if span.start < self.steps] + [Span(version, self.steps)]
        self.steps += 1
        ended = [sample for sample, (ids, _) in self.unended.items() if len(ids) == self.steps]
        self.ended_tokens += self.steps * len(ended)
        return [self._completion(sample, *self.unended.pop(sample)) for sample in ended]

    def aborted(self) -> list[Completion]:
        return [
            self._completion(sample, ids[: self.steps], logprobs[: self.steps], finish="abort")
            for sample, (ids, logprobs) in self.unended.items()
        ]

    def _completion(
        self, sample: int, ids: npt.NDArray[np.int32], logprobs: npt.NDArray[np.float32], finish: Finish | None = None
    ) -> Completion:
        return Completion(
            group=self.request.group, sample=sample, token_ids=ids, logprobs=logprobs,
            finish=finish or ("stop" if int(ids[-1]) in self.request.sampling.stop_ids else "length"), spans=tuple(self.spans),
            started_ns=self.started_ns, ended_ns=time.time_ns(),
        )  # fmt: skip


def _generate(request: GroupRequest, sample: int, base: int, vocabulary: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """Return all token ids and logprobs of a sample, which follow from request, prompt and weights (`base`)."""
    sampling = request.sampling
    seed, group, sample = (0, 0, 0) if sampling.greedy else (request.seed, request.random_group, sample)
    longest = sampling.max_new_tokens
    numbers = uniforms(seed=seed ^ base, group=group, sample=sample, count=2 * longest + 1)
    ordinary = np.setdiff1d(np.arange(vocabulary, dtype=np.int32), np.array(sampling.stop_ids, dtype=np.int32))
    length = 1 + int(numbers[-1] * longest) if sampling.stop_ids else longest
    ids = ordinary[(numbers[:length] * len(ordinary)).astype(np.int64)]
    if length < longest:
        ids[-1] = sampling.stop_ids[0]
    return ids, np.log1p(-numbers[longest : longest + length]).astype(np.float32)


KIND = EngineKind(
    open=lambda settings: ToyEngine(delay_s=settings.delay_s, capacity=settings.concurrency), swaps_in_flight=True, sleeps=True
)
