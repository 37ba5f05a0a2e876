"""Generates with vLLM step by step, and loads new weights between any two steps, under which running samples continue.

Each token has the version that vLLM had when it was sampled, and the logprob of its sampling distribution. An engine whose weights may be
half loaded never generates again.
"""

import contextlib
import heapq
import itertools
import shutil
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from penstock.infra.engines.base import (
    DIRECTORY_VERSION,
    Completion,
    EngineSettings,
    Finish,
    GroupInFlight,
    GroupRequest,
    Span,
    check_tensors,
)
from penstock.infra.engines.vllm import private
from penstock.infra.engines.vllm.model_info import parameter_shapes
from penstock.infra.engines.vllm.process import watch_processes
from penstock.infra.engines.vllm.rows import Counts, Group, Row, logprobs_and_support, partial_output, sample_seed, sampling_arguments
from penstock.infra.engines.vllm.start import check_installed, engine_arguments, start_vllm
from penstock.infra.errors import EngineError, one_line
from penstock.infra.tensors.host_memory import HostBuffers
from penstock.infra.tensors.stream import TensorBytes

WAIT_S = 0.1
"""Longest time that a step waits for an engine in another process."""
EXIT_S = 1.0
STAGE_POLL_S = 0.005
"""How often an engine is requested to look whether a version has reached its device."""
_transfer_ids = itertools.count()
"""Ids of weight transfers within this process, unique over its engines."""


class VllmEngine:
    """Runs up to `concurrency` samples of any number of groups; a process has at most one such engine."""

    def __init__(self, settings: EngineSettings) -> None:
        on_cpu, concurrency, engine_process = check_installed(settings.device), settings.concurrency, settings.engine_process
        arguments = engine_arguments(settings, on_cpu=on_cpu)
        self._llm, self._scratch = start_vllm(arguments, threads=settings.threads, engine_process=engine_process, on_cpu=on_cpu)
        self._counts = Counts(concurrency)
        self._exited = threading.Event()
        self._broken: str | None = None
        self._processes: list[Any] = []
        try:
            private.check_engine(self._llm, own_process=engine_process)
            config = self._llm.vllm_config
            # vLLM's loggers off, its scheduler's figures on.
            self._llm.log_stats = self._llm.output_processor.log_stats = False
            self._llm.logger_manager = self._counts
            self._shapes = parameter_shapes(settings.directory, config.model_config.hf_config)
            self._longest, self._vocabulary = int(config.model_config.max_model_len), int(config.model_config.get_vocab_size())
            self._own_process = engine_process
            self._shared = engine_process or config.parallel_config.world_size > 1
            if engine_process:
                self._processes = list(self._llm.engine_core.resources.engine_manager.processes)  # vLLM drops those that have exited
                watch_processes(self._llm.engine_core, self._exited)
            else:
                shutil.rmtree(self._scratch, ignore_errors=True)  # needed only during the start
            self._llm.set_weight_version(str(DIRECTORY_VERSION))
        except BaseException:
            self.close()
            raise
        self.version = DIRECTORY_VERSION
        self._buffers = HostBuffers(shared=True)
        """Shared memory for tensors that an engine in another process cannot map."""
        self._keep, self._concurrency = settings.kv_cache == "keep", concurrency
        self._cache_sleeps = False
        self._groups: list[Group] = []
        self._waiting: list[tuple[int, int, Group]] = []
        self._rows: dict[str, Row] = {}
        self._order, self._ids = itertools.count(), itertools.count()

    @property
    def pending(self) -> int:
        return len(self._groups)

    @property
    def idle(self) -> bool:
        return not self._groups

    @property
    def has_room(self) -> bool:
        return len(self._rows) + sum(len(group.waiting) for *_, group in self._waiting) < self._concurrency

    def submit(self, request: GroupRequest) -> None:
        """Queue a group. Raises `EngineError` for a prompt that is too long or has ids outside the model's vocabulary."""
        ids, longest = request.prompt_ids, len(request.prompt_ids) + request.sampling.max_new_tokens
        if longest > self._longest:
            raise EngineError(
                f"group {request.group}: {len(ids)} prompt tokens and {request.sampling.max_new_tokens} new ones exceed the "
                f"{self._longest} of rollout.vllm.max_model_len: raise it, or lower sampling.max_new_tokens or data.max_prompt_tokens"
            )
        if int(ids.min()) < 0 or int(ids.max()) >= self._vocabulary:
            raise EngineError(f"group {request.group}: the prompt contains token ids outside the model's vocabulary of {self._vocabulary}")
        group = Group(request=request, prompt=ids.tolist(), waiting=sorted(request.samples, reverse=True), unended=len(request.samples))
        self._groups.append(group)
        heapq.heappush(self._waiting, (request.group, next(self._order), group))

    def step(self) -> list[Completion]:
        """Pass waiting samples to vLLM, run one of its steps, or wait `WAIT_S` for its process; return the samples that ended."""
        self._usable()
        if not self._groups:
            return []
        started = time.perf_counter()
        try:
            self._add_requests()
            if self._own_process and not self._has_output():
                return []
            outputs = self._llm.step()
        except Exception as error:
            raise self._broken_by("while generating", error) from error
        finally:
            self._counts.sums["decode_s"] += time.perf_counter() - started
        self._counts.sums["decode_steps"] += 1
        return [self._finished(output) for output in outputs if output.finished]

    def abort(self, group: int) -> list[Completion]:
        """Abort a group; return its unfinished requested samples with their tokens so far and finish "abort"."""
        self._usable()
        ending = [member for member in self._groups if member.request.group == group]
        if not ending:
            return []
        rows = [row for row in self._rows.values() if any(row.group is member for member in ending)]
        states = self._llm.output_processor.request_states
        aborted = [self._completion(row, partial_output(states[row.internal]), "abort") for row in rows]
        try:
            self._llm.abort_request([row.internal for row in rows], internal=True)
        except Exception as error:
            raise self._broken_by("while aborting", error) from error
        for row in rows:
            del self._rows[row.name]
        aborted += [self._empty(member, sample) for member in ending for sample in member.waiting]
        self._groups = [member for member in self._groups if member.request.group != group]
        self._waiting = [entry for entry in self._waiting if entry[0] != group]
        heapq.heapify(self._waiting)
        self._counts.sums["aborted_tokens"] += sum(len(completion.token_ids) for completion in aborted)
        return sorted(aborted, key=lambda completion: completion.sample)

    def groups_in_flight(self) -> list[GroupInFlight]:
        """Return tokens and oldest policy version of each group in flight, lowest group number first."""
        states = self._llm.output_processor.request_states
        tokens = {id(group): group.tokens for group in self._groups}
        oldest = {id(group): group.oldest for group in self._groups}
        for row in self._rows.values():
            state, key = states[row.internal], id(row.group)
            tokens[key] += state.detokenizer.num_output_tokens()
            if state.weight_version_starts:
                oldest[key] = _older(oldest[key], int(state.weight_version_starts[0][0]))
        groups = [
            GroupInFlight(group=group.request.group, tokens=tokens[id(group)], oldest_version=oldest[id(group)]) for group in self._groups
        ]
        return sorted(groups, key=lambda progress: progress.group)

    def load_weights(self, version: int, tensors: Iterable[TensorBytes]) -> None:
        """Load all tensors, also while samples are in flight, which continue under them; after an error the engine is unusable."""
        self._usable()
        started = time.perf_counter()
        weights = check_tensors(tensors, self._shapes, version=version)
        try:
            paused_s = self._swap(version, weights)
            if self._cache_sleeps:
                self._llm.engine_core.wake_up(["kv_cache"])
                self._cache_sleeps = False
        except Exception as error:
            raise self._broken_by(f"while loading weights version {version}", error) from error
        self.version = version
        elapsed_s = time.perf_counter() - started
        # An engine in a process of its own generates until it is paused.
        self._counts.loaded(elapsed_s, stall_s=(paused_s if self._own_process else elapsed_s) if self._rows else None)

    def sleep(self) -> None:
        """Free weights and KV cache (vLLM's level 2); the next weights are read from the log."""
        self._usable()
        assert self.idle, "an engine with groups in flight does not sleep"
        try:
            self._llm.engine_core.sleep(2)  # not `LLMEngine.sleep`, which needs vLLM's own loggers
        except Exception as error:
            raise self._broken_by("while entering sleep mode", error) from error
        self.version, self._cache_sleeps = DIRECTORY_VERSION, True

    def wake(self) -> None:
        """Allocate memory for the weights; the KV cache is allocated after they are loaded, because loading needs memory too."""
        self._usable()
        try:
            self._llm.engine_core.wake_up(["weights"])
        except Exception as error:
            raise self._broken_by("while leaving sleep mode", error) from error

    def stats(self) -> dict[str, float]:
        return self._counts.all()

    def close(self) -> None:
        """End vLLM and its processes; every later call raises `EngineError`."""
        with contextlib.suppress(Exception):  # it may have exited
            self._llm.engine_core.shutdown()
        self._broken = self._broken or "this engine is closed"
        self._groups, self._waiting, self._rows = [], [], {}
        del self._llm.output_processor, self._llm.engine_core
        with contextlib.suppress(AttributeError):
            del self._llm.model_executor
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _swap(self, version: int, tensors: Sequence[TensorBytes]) -> float:
        """Load `tensors` as `version` by vLLM's own calls; returns the seconds between pause and resume, when nothing is generated.

        After an error the weights may be half loaded, and vLLM is never resumed.
        """
        from penstock.infra.engines.vllm import transfer

        with contextlib.ExitStack() as undo:
            if self._shared:
                info = transfer.in_shared_memory(tensors)
                if info is None:
                    tensors = self._buffers.copy(tensors)
                    info = transfer.in_shared_memory(tensors)
            else:
                number = next(_transfer_ids)
                info = transfer.register(number, tensors)
                undo.callback(transfer.unregister, number)
            while self._own_process and self._rows and not all(self._llm.collective_rpc("stage_version", args=(info,))):
                time.sleep(STAGE_POLL_S)
            core = self._llm.engine_core.call_utility if self._own_process else self._call_core
            started = time.perf_counter()
            core("pause_scheduler", "keep", not self._keep)
            self._llm.collective_rpc("load_version", args=(info,))
            self._llm.set_weight_version(str(version))
            core("resume_scheduler")
            return time.perf_counter() - started

    def _call_core(self, method: str, *arguments: Any) -> Any:
        return getattr(self._llm.engine_core.engine_core, method)(*arguments)

    def _add_requests(self) -> None:
        """Pass samples to vLLM while it has free rows, lowest group first; the others wait here, where an abort costs nothing."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        while self._waiting and len(self._rows) < self._concurrency:
            group = self._waiting[0][2]
            sample, request = group.waiting.pop(), group.request
            if not group.waiting:
                heapq.heappop(self._waiting)
            parameters = SamplingParams(
                **sampling_arguments(request.sampling),
                seed=sample_seed(request.seed, request.random_group, sample) if request.sampling.seeded else None,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            prompt: dict[str, Any] = {"prompt_token_ids": group.prompt}
            if self._keep:
                prompt["cache_salt"] = str(self.version)  # else a new sample would start on an old version's KV cache
            name = str(next(self._ids))
            internal = self._llm.add_request(name, prompt, parameters)
            self._rows[name] = Row(name=name, internal=internal, group=group, sample=sample, started_ns=time.time_ns())

    def _has_output(self) -> bool:
        """Wait up to `WAIT_S` for output of the engine's process; True if there is any."""
        queue = self._llm.engine_core.outputs_queue
        with queue.not_empty:
            return bool(queue.queue) or (queue.not_empty.wait(WAIT_S) and bool(queue.queue))

    def _finished(self, output: Any) -> Completion:
        """Account for a sample that vLLM has finished, and return it."""
        row, sampled = self._rows.pop(output.request_id), output.outputs[0]
        if sampled.finish_reason not in ("stop", "length"):
            raise self._broken_by("while generating", RuntimeError(f"vLLM ended a sample with {sampled.finish_reason!r}"))
        completion = self._completion(row, sampled, "length" if sampled.finish_reason == "length" else "stop")
        group = row.group
        group.unended -= 1
        group.tokens += len(completion.token_ids)
        group.oldest = _older(group.oldest, completion.spans[0].version)
        self._counts.sums["tokens"] += len(completion.token_ids)
        if not group.unended:
            self._groups = [member for member in self._groups if member is not group]
            self._counts.sums["groups"] += 1
        return completion

    def _completion(self, row: "Row", sampled: Any, finish: Finish) -> Completion:
        """Convert vLLM's output of a sample. Raises `EngineError`, for good, if logprobs or versions are missing or not finite."""
        ids = np.array(sampled.token_ids, dtype=np.int32)
        logprobs, support = logprobs_and_support(sampled.logprobs, len(ids), limited=row.group.request.sampling.limited)
        spans = tuple(Span(int(span.version), span.start) for span in sampled.weight_versions or () if span.end > span.start)
        if len(logprobs) != len(ids) or (len(ids) and not spans):
            raise self._broken_by(
                "while generating", RuntimeError(f"it returned {len(ids)} tokens, {len(logprobs)} logprobs and {len(spans)} version spans")
            )
        if not np.isfinite(logprobs).all():
            raise self._broken_by("while generating", RuntimeError(f"weights version {spans[-1].version} produces NaN logits"))
        if finish == "length" and int(ids[-1]) in row.group.request.sampling.stop_ids:
            finish = "stop"
        return Completion(
            group=row.group.request.group, sample=row.sample, token_ids=ids, logprobs=logprobs, finish=finish,
            spans=spans or (Span(self.version, 0),), started_ns=row.started_ns, ended_ns=time.time_ns(), support=support,
        )  # fmt: skip

    def _empty(self, group: "Group", sample: int) -> Completion:
        """Return an aborted sample that was never started."""
        now = time.time_ns()
        return Completion(
            group=group.request.group, sample=sample, token_ids=np.zeros(0, dtype=np.int32), logprobs=np.zeros(0, dtype=np.float32),
            finish="abort", spans=(Span(self.version, 0),), started_ns=now, ended_ns=now,
        )  # fmt: skip

    def _usable(self) -> None:
        if self._exited.is_set() and self._broken is None:
            raise self._broken_by("between two steps", RuntimeError("unknown cause"))
        if self._broken is not None:
            raise EngineError(self._broken)

    def _broken_by(self, when: str, error: Exception) -> EngineError:
        """Mark the engine as unusable; return the error to raise, which names the cause."""
        if isinstance(error, EngineError):
            return error
        cause = one_line(error, characters=400)
        if self._own_process:
            if self._exited.is_set():  # its pipe closes a moment before its exit code is available
                for process in self._processes:
                    process.join(EXIT_S)
            codes = [process.exitcode for process in self._processes]
            if self._exited.is_set() or any(code is not None for code in codes):
                cause = f"its process ended with exit code {next((code for code in codes if code is not None), 'unknown')}"
        self._broken = f"vLLM failed {when} ({cause}): restart the worker; its log contains vLLM's messages"
        return EngineError(self._broken)


def _older(version: int | None, other: int) -> int:
    return other if version is None else min(version, other)
