"""An engine without a model: pseudo-random completions at a chosen speed, for tests and for measuring everything else.

The rule: the same contract as the real ones; a completion is a function of the request and of the weights' digest.
"""

import hashlib
import heapq
import time
from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt

from infra.engines.requests import DIRECTORY_VERSION, Completion, GroupRequest, check_tensors, uniforms
from infra.errors import EngineError
from infra.tensors import TensorBytes, digest


class ToyEngine:
    """Draws up to `capacity` groups side by side; a step takes `delay_s`.

    Lengths are uniform from 1 to `max_new_tokens`, tokens uniform over `vocabulary` ids. The parameters' names and shapes are `parameters`
    or, without it, those of the first weights that come.
    """

    def __init__(
        self,
        *,
        vocabulary: int = 100,
        delay_s: float = 0.0,
        capacity: int = 1,
        parameters: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        self.capacity = capacity
        self.version = DIRECTORY_VERSION
        self._vocabulary, self._delay_s = vocabulary, delay_s
        self._shapes = None if parameters is None else dict(parameters)
        self._salt = b""
        self._waiting: list[tuple[int, int, GroupRequest]] = []
        self._drawing: list[_Group] = []
        self._submitted = 0
        self._stats = {"groups": 0.0, "tokens": 0.0, "decode_steps": 0.0, "busy_s": 0.0, "loads": 0.0}

    @property
    def pending(self) -> int:
        return len(self._waiting) + len(self._drawing)

    @property
    def idle(self) -> bool:
        return not self.pending

    def submit(self, request: GroupRequest) -> None:
        self._submitted += 1
        heapq.heappush(self._waiting, (request.group, self._submitted, request))

    def step(self) -> list[Completion]:
        while self._waiting and len(self._drawing) < self.capacity:
            request = heapq.heappop(self._waiting)[2]
            self._drawing.append(_Group(request, vocabulary=self._vocabulary, salt=self._salt, version=self.version))
        if not self._drawing:
            return []
        if self._delay_s:
            time.sleep(self._delay_s)
        ended = [completion for group in self._drawing for completion in group.step()]
        self._stats["decode_steps"] += 1
        self._stats["busy_s"] += self._delay_s
        self._stats["tokens"] += sum(len(completion.token_ids) for completion in ended)
        self._stats["groups"] += sum(not group.left for group in self._drawing)
        self._drawing = [group for group in self._drawing if group.left]
        return ended

    def drop(self, group: int) -> None:
        self._waiting = [entry for entry in self._waiting if entry[0] != group]
        heapq.heapify(self._waiting)
        self._drawing = [one for one in self._drawing if one.request.group != group]

    def load_weights(self, version: int, tensors: Iterable[TensorBytes]) -> None:
        if not self.idle:
            raise EngineError(f"version {version} came while {self.pending} groups are in hand: load weights between groups")
        held = list(tensors)
        shapes = self._shapes or {tensor.name: tuple(tensor.shape) for tensor in held}
        self._salt = digest(check_tensors(held, shapes, version=version)).encode()
        self._shapes, self.version = shapes, version
        self._stats["loads"] += 1

    def stats(self) -> dict[str, float]:
        return dict(self._stats)

    def close(self) -> None:
        self._waiting.clear()
        self._drawing.clear()


class _Group:
    """One group in work: its wanted samples are known when it begins and come out at their lengths."""

    def __init__(self, request: GroupRequest, *, vocabulary: int, salt: bytes, version: int) -> None:
        self.request, self.version, self.steps, self.started_ns = request, version, 0, time.time_ns()
        prompt = np.ascontiguousarray(request.prompt_ids, dtype="<i4").tobytes()
        base = hashlib.sha256(salt + prompt + repr(request.sampling).encode()).digest()
        self.left = {sample: _draw(request, sample, int.from_bytes(base[:7], "little"), vocabulary) for sample in request.samples}

    def step(self) -> list[Completion]:
        self.steps += 1
        ended = [sample for sample, (ids, _) in self.left.items() if len(ids) == self.steps]
        return [self._completion(sample, *self.left.pop(sample)) for sample in ended]

    def _completion(self, sample: int, ids: npt.NDArray[np.int32], logprobs: npt.NDArray[np.float32]) -> Completion:
        return Completion(
            group=self.request.group,
            sample=sample,
            token_ids=ids,
            logprobs=logprobs,
            finish="stop" if int(ids[-1]) in self.request.sampling.stop_ids else "length",
            version=self.version,
            started_ns=self.started_ns,
            ended_ns=time.time_ns(),
        )


def _draw(request: GroupRequest, sample: int, base: int, vocabulary: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    sampling = request.sampling
    seed, group, sample = (0, 0, 0) if sampling.greedy else (request.seed, request.group, sample)
    longest = sampling.max_new_tokens
    numbers = uniforms(seed=seed ^ base, group=group, sample=sample, count=2 * longest + 1)
    ordinary = np.setdiff1d(np.arange(vocabulary, dtype=np.int32), np.array(sampling.stop_ids, dtype=np.int32))
    length = 1 + int(numbers[-1] * longest) if sampling.stop_ids else longest
    ids = ordinary[(numbers[:length] * len(ordinary)).astype(np.int64)]
    if length < longest:
        ids[-1] = sampling.stop_ids[0]
    return ids, np.log1p(-numbers[longest : longest + length]).astype(np.float32)
