"""Generates with any Hugging Face causal LM, one group at a time as a batch of constant shape.

Sample s is row s of `rows` rows over one prompt, without padding. Rows that are not requested or have ended continue as dummies, so that
all bits depend only on the request and the weights.
"""

import heapq
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from penstock.infra.engines.base import DIRECTORY_VERSION, Completion, Finish, GroupInFlight, GroupRequest, Span, check_tensors, uniforms
from penstock.infra.engines.transformers.decoder import Decoder, choose, open_decoder
from penstock.infra.errors import EngineError, one_line
from penstock.infra.tensors.float32_head import set_float32_head
from penstock.infra.tensors.stream import TensorBytes
from penstock.infra.tensors.torch_copy import copy_all

DType = Literal["auto", "float32", "bfloat16", "float16"]
Ends = Callable[[npt.NDArray[np.int32]], bool]
"""[T] ids so far -> True if the newest one ends the completion."""
MARGIN = 8
"""Decoded tokens before the longest stop text, on which the decoding of its first token depends."""


class TransformersEngine:
    """Runs one group at a time, lowest number first.

    `threads` is set as the process's torch thread count, on which the last bits of logits depend.
    """

    def __init__(
        self, directory: str | Path, *, dtype: DType = "auto", float32_head: bool = False, device: str = "cpu", threads: int = 1
    ) -> None:
        torch.set_num_threads(threads)
        self._model = load_model(directory, dtype=dtype, device=device)
        if float32_head:
            set_float32_head(self._model)
        self._parameters = dict(self._model.named_parameters())
        self._shapes = {name: tuple(parameter.shape) for name, parameter in self._parameters.items()}
        self._positions: int | None = getattr(self._model.config, "max_position_embeddings", None)
        self._vocabulary = int(self._model.get_input_embeddings().weight.shape[0])
        self._decoder: Decoder = open_decoder(self._model)
        self._directory = Path(directory)
        self._texts: Texts | None = None
        self.version = DIRECTORY_VERSION
        self._waiting: list[tuple[int, int, GroupRequest]] = []
        self._submitted = 0
        self._running: _Group | None = None
        self._stats = dict.fromkeys(("groups", "tokens", "decode_steps", "prefill_s", "decode_s", "loads", "load_s"), 0.0)

    @property
    def pending(self) -> int:
        return len(self._waiting) + (self._running is not None)

    @property
    def idle(self) -> bool:
        return not self.pending

    has_room = idle

    def submit(self, request: GroupRequest) -> None:
        """Queue a group. Raises `EngineError` for a prompt that is too long or has ids outside the model's vocabulary."""
        ids, longest = request.prompt_ids, len(request.prompt_ids) + request.sampling.max_new_tokens
        if self._positions is not None and longest > self._positions:
            raise EngineError(
                f"group {request.group}: {len(ids)} prompt tokens and {request.sampling.max_new_tokens} new ones exceed the model's "
                f"{self._positions} positions: lower sampling.max_new_tokens or data.max_prompt_tokens"
            )
        if int(ids.min()) < 0 or int(ids.max()) >= self._vocabulary:
            raise EngineError(f"group {request.group}: the prompt contains token ids outside the model's vocabulary of {self._vocabulary}")
        self._submitted += 1
        heapq.heappush(self._waiting, (request.group, self._submitted, request))

    def step(self) -> list[Completion]:
        """Generate one token in every row of the running group, or start the next one; return the requested samples that end."""
        if self.idle:
            return []
        started = time.perf_counter()
        with torch.inference_mode():
            if self._running is None:
                group = self._running = self._group_of(heapq.heappop(self._waiting)[2])
                logits = self._decoder.prefill(group.prompt, rows=group.request.rows, room=group.request.sampling.max_new_tokens)
                self._stats["prefill_s"] += time.perf_counter() - started
            else:
                group = self._running
                logits = self._decoder.next(group.newest)
                self._stats["decode_steps"] += 1
                self._stats["decode_s"] += time.perf_counter() - started
            group.newest, logprobs, support = choose(logits, group.uniforms[group.steps], group.request.sampling)
            if support is not None:
                group.support[:, group.steps] = support.cpu().numpy()
            ended = group.append(group.newest.cpu().numpy(), logprobs.cpu().numpy(), version=self.version)
        self._stats["tokens"] += sum(len(completion.token_ids) for completion in ended)
        if not group.unended:
            self._running = None
            self._stats["groups"] += 1
        return ended

    def abort(self, group: int) -> list[Completion]:
        """Abort a group; return its unfinished requested samples with their tokens so far and finish "abort"."""
        requests = [entry[2] for entry in self._waiting if entry[0] == group]
        self._waiting = [entry for entry in self._waiting if entry[0] != group]
        heapq.heapify(self._waiting)
        aborted = [completion for request in requests for completion in self._group_of(request).aborted(version=self.version)]
        if self._running is not None and self._running.request.group == group:
            aborted += self._running.aborted(version=self.version)
            self._running = None
        return aborted

    def groups_in_flight(self) -> list[GroupInFlight]:
        groups = [GroupInFlight(group=group, tokens=0, oldest_version=None) for group, _, _ in self._waiting]
        if self._running is not None:
            tokens = self._running.steps * len(self._running.unended) + self._running.ended_tokens
            groups.append(GroupInFlight(group=self._running.request.group, tokens=tokens, oldest_version=self.version))
        return sorted(groups, key=lambda progress: progress.group)

    def load_weights(self, version: int, tensors: Iterable[TensorBytes]) -> None:
        """Replace all weights, or none and raise `EngineError`; only while no group is in flight."""
        if not self.idle:
            raise EngineError(f"cannot load weights version {version}: {self.pending} groups are in flight; load weights between groups")
        started = time.perf_counter()
        copy_all((self._parameters[tensor.name], tensor) for tensor in check_tensors(tensors, self._shapes, version=version))
        self.version = version
        self._stats["loads"] += 1
        self._stats["load_s"] += time.perf_counter() - started

    def sleep(self) -> None:
        """Free the weights, and the keys and values of the last group."""
        assert self.idle, "an engine with groups in flight does not sleep"
        self._decoder.forget()
        for parameter in self._parameters.values():
            parameter.data = parameter.data.new_empty(0)
        if self._model.device.type == "cuda":
            torch.cuda.empty_cache()  # else torch keeps the freed memory for this process
        self.version = DIRECTORY_VERSION

    def wake(self) -> None:
        """Allocate memory for the weights, which have to be loaded next."""
        for name, parameter in self._parameters.items():
            parameter.data = parameter.data.new_empty(self._shapes[name])

    def _group_of(self, request: GroupRequest) -> "_Group":
        stop = request.sampling.stop
        if stop and self._texts is None:
            self._texts = Texts(self._directory)
        return _Group.of(request, device=self._model.device, ends=self._texts.ends(stop) if stop and self._texts else None)

    def stats(self) -> dict[str, float]:
        return self._stats | {"traced": float(self._decoder.traced)}

    def close(self) -> None:
        self._waiting.clear()
        self._running = None
        del self._decoder, self._parameters, self._model


@dataclass(slots=True, kw_only=True, eq=False)
class _Group:
    """The running group: the tokens of its rows so far and the requested samples that have not ended."""

    request: GroupRequest
    prompt: torch.Tensor
    uniforms: torch.Tensor
    newest: torch.Tensor
    ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    support: npt.NDArray[np.int32]
    """[rows, longest, k], k = 0 unless the sampling is limited."""
    stops: npt.NDArray[np.int64]
    ends: Ends | None
    unended: set[int]
    ended_tokens: int
    steps: int
    started_ns: int

    @classmethod
    def of(cls, request: GroupRequest, *, device: torch.device, ends: Ends | None) -> "_Group":
        """Return the group of a request before its first token, with the random numbers of all its rows."""
        rows, longest = request.rows, request.sampling.max_new_tokens
        numbers = [uniforms(seed=request.seed, group=request.random_group, sample=sample, count=longest) for sample in range(rows)]
        return cls(
            request=request,
            prompt=torch.as_tensor(np.asarray(request.prompt_ids, dtype=np.int64), device=device),
            uniforms=torch.as_tensor(np.stack(numbers, axis=1), device=device),  # [longest, rows]
            newest=torch.empty(0, dtype=torch.int64),
            ids=np.zeros((rows, longest), dtype=np.int32),
            logprobs=np.zeros((rows, longest), dtype=np.float32),
            support=np.full((rows, longest, request.sampling.top_k if request.sampling.limited else 0), -1, dtype=np.int32),
            ends=ends,
            stops=np.array(request.sampling.stop_ids, dtype=np.int64),
            unended=set(request.samples),
            ended_tokens=0,
            steps=0,
            started_ns=time.time_ns(),
        )

    def append(self, ids: npt.NDArray[np.int64], logprobs: npt.NDArray[np.float32], *, version: int) -> list[Completion]:
        """Append a token to each row and return the requested samples that end with it. Raises `EngineError` for NaN logits."""
        if not np.isfinite(logprobs).all():
            raise EngineError(f"weights version {version} produces NaN logits: continue from an earlier step (`penstock fork`)")
        self.ids[:, self.steps], self.logprobs[:, self.steps] = ids, logprobs
        self.steps += 1
        stopped = (ids[:, None] == self.stops).any(1)
        if self.ends is not None:
            stopped[[row for row in self.unended if self.ends(self.ids[row, : self.steps])]] = True
        full = self.steps == self.request.sampling.max_new_tokens
        ended = [row for row in np.flatnonzero(stopped | full).tolist() if row in self.unended]
        self.unended.difference_update(ended)
        self.ended_tokens += self.steps * len(ended)
        return [self._completion(row, "stop" if stopped[row] else "length", version=version) for row in ended]

    def aborted(self, *, version: int) -> list[Completion]:
        """Return the requested samples that have not ended, with their tokens so far."""
        return [self._completion(row, "abort", version=version) for row in sorted(self.unended)]

    def _completion(self, row: int, finish: Finish, *, version: int) -> Completion:
        return Completion(
            group=self.request.group, sample=row, token_ids=self.ids[row, : self.steps].copy(),
            logprobs=self.logprobs[row, : self.steps].copy(), finish=finish, spans=(Span(version, 0),), started_ns=self.started_ns,
            ended_ns=time.time_ns(), support=self.support[row, : self.steps].copy() if self.request.sampling.limited else None,
        )  # fmt: skip


class Texts:
    """The tokenizer of a model directory, for stop texts."""

    def __init__(self, directory: Path) -> None:
        """Read the tokenizer of a model directory. Raises `EngineError` if that fails."""
        from tokenizers import Tokenizer

        try:
            self._tokenizer: Any = Tokenizer.from_file(str(directory / "tokenizer.json"))
        # The library raises plain Exception for a file it cannot read.
        except Exception as error:
            raise EngineError(f"sampling.stop: cannot read the tokenizer {directory / 'tokenizer.json'}: {error}") from error

    def ends(self, stop: Sequence[str]) -> Ends:
        """Return a function that tests whether the newest token completes any of these texts; each token adds at least one byte."""
        window = max(len(text.encode()) for text in stop) + MARGIN

        def ended(ids: npt.NDArray[np.int32]) -> bool:
            text = self._tokenizer.decode(ids[-window:].tolist(), skip_special_tokens=True)
            return any(stop_text in text for stop_text in stop)

        return ended


def load_model(directory: str | Path, *, dtype: DType = "auto", device: str = "cpu") -> Any:
    """Return a causal LM in evaluation mode from a local directory; downloads nothing. Raises `EngineError`."""
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    path = Path(directory)
    advice = "set model.path to a Hugging Face causal LM directory, or make one with `penstock model tiny DIR`"
    if not (path / "config.json").is_file():
        raise EngineError(f"there is no model in {path} ({'it has no config.json' if path.is_dir() else 'no such directory'}): {advice}")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, local_files_only=True, trust_remote_code=False, output_loading_info=True
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, ImportError, SafetensorError) as error:
        raise EngineError(f"cannot load the model in {path} ({one_line(error)}): {advice}") from error
    if missing := info["missing_keys"]:
        raise EngineError(f"the weights in {path} lack {len(missing)} parameters, the first is {min(missing)}: {advice}")
    return model.to(device).eval().requires_grad_(False)
