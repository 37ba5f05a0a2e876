"""Draws with vLLM, step by step, and takes new weights between any two steps, under which the samples in work go on.

The rule: a token's label is the version vLLM had when it drew it, its logprob is of the distribution it was drawn from, and an engine
whose weights may be half loaded never draws again.
"""

import contextlib
import heapq
import itertools
import shutil
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from penstock.infra.engines.base import DIRECTORY_VERSION, Completion, Finish, GroupInFlight, GroupRequest, Span, check_tensors
from penstock.infra.engines.vllm.arguments import check_installed, engine_arguments
from penstock.infra.engines.vllm.model_info import parameter_shapes, read_geometry
from penstock.infra.engines.vllm.rows import Group, Row, logprobs_and_support, partial_output, sample_seed, sampling_arguments
from penstock.infra.engines.vllm.start import one_line, start_vllm
from penstock.infra.engines.vllm.stats import Counts
from penstock.infra.engines.vllm.swap import swap
from penstock.infra.engines.vllm.watch import watch_processes
from penstock.infra.errors import EngineError
from penstock.infra.tensors.stream import TensorBytes

WAIT_S = 0.1
"""How long a step waits for an engine in another process; then its owner may look after other things."""
EXIT_S = 1.0


class VllmEngine:
    """Up to `concurrency` samples side by side, of as many groups as that takes; a process holds one such engine.

    `longest` bounds prompt and completion together and with that the memory for keys and values; `top_k` and `stops_at_text` are what will
    be asked for at most; `arguments` are vLLM's own. Under
    `kv_cache` "recompute" samples in work compute keys and values anew on new weights, under "keep" they go on over the old ones.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        dtype: Literal["float32", "bfloat16"] = "float32",
        device: str = "auto",
        threads: int = 1,
        concurrency: int = 64,
        longest: int | None = None,
        kv_cache: Literal["recompute", "keep"] = "recompute",
        engine_process: bool = False,
        seed: int = 0,
        top_k: int = 0,
        stops_at_text: bool = False,
        sleeps: bool = False,
        arguments: Mapping[str, Any] | None = None,
    ) -> None:
        """Start vLLM and load the model. Raises `EngineError`."""
        path, on_cpu = Path(directory), check_installed(device)
        chosen = engine_arguments(
            arguments or {}, directory=path, geometry=read_geometry(path), dtype=dtype, seed=seed, concurrency=concurrency,
            longest=longest, engine_process=engine_process, on_cpu=on_cpu, top_k=top_k, stops_at_text=stops_at_text,
            sleeps=sleeps,
        )  # fmt: skip
        self._llm, self._scratch = start_vllm(chosen, threads=threads, engine_process=engine_process, on_cpu=on_cpu)
        self._counts = Counts(concurrency)
        self._dead = threading.Event()
        self._broken: str | None = None
        self._processes: list[Any] = []
        try:
            config = self._llm.vllm_config
            # vLLM's loggers off, its scheduler's figures on.
            self._llm.log_stats = self._llm.output_processor.log_stats = False
            self._llm.logger_manager = self._counts
            self._shapes = parameter_shapes(path, config.model_config.hf_config)
            self._longest, self._vocabulary = int(config.model_config.max_model_len), int(config.model_config.get_vocab_size())
            self._own_process = engine_process
            self._shared = engine_process or config.parallel_config.world_size > 1
            if engine_process:
                self._processes = list(self._llm.engine_core.resources.engine_manager.processes)  # vLLM forgets those that have died
                watch_processes(self._llm.engine_core, self._dead)
            else:
                shutil.rmtree(self._scratch, ignore_errors=True)  # nothing is looked up in it any more
            self._llm.set_weight_version(str(DIRECTORY_VERSION))
        except BaseException:
            self.close()
            raise
        self.version = DIRECTORY_VERSION
        self._keep, self._concurrency = kv_cache == "keep", concurrency
        self._cache_sleeps = False
        self._groups: list[Group] = []
        self._waiting: list[tuple[int, int, Group]] = []
        self._work: dict[str, Row] = {}
        self._order, self._ids = itertools.count(), itertools.count()

    @property
    def pending(self) -> int:
        return len(self._groups)

    @property
    def idle(self) -> bool:
        return not self._groups

    @property
    def has_room(self) -> bool:
        return len(self._work) + sum(len(group.waiting) for *_, group in self._waiting) < self._concurrency

    def submit(self, request: GroupRequest) -> None:
        ids, longest = request.prompt_ids, len(request.prompt_ids) + request.sampling.max_new_tokens
        if longest > self._longest:
            raise EngineError(
                f"group {request.group}: {len(ids)} prompt tokens and {request.sampling.max_new_tokens} new ones exceed the "
                f"{self._longest} of rollout.vllm.max_model_len: raise it, lower sampling.max_new_tokens, or leave out longer prompts"
            )
        if int(ids.min()) < 0 or int(ids.max()) >= self._vocabulary:
            raise EngineError(f"group {request.group}: the prompt has ids outside the model's {self._vocabulary} tokens")
        group = Group(request=request, prompt=ids.tolist(), waiting=sorted(request.samples, reverse=True), left=len(request.samples))
        self._groups.append(group)
        heapq.heappush(self._waiting, (request.group, next(self._order), group))

    def step(self) -> list[Completion]:
        self._usable()
        if not self._groups:
            return []
        began = time.perf_counter()
        try:
            self._hand_over()
            if self._own_process and not self._answered():
                return []
            outputs = self._llm.step()
        except Exception as error:
            raise self._ended("while drawing", error) from error
        finally:
            self._counts.decode_s += time.perf_counter() - began
        self._counts.decode_steps += 1
        return [self._finished(output) for output in outputs if output.finished]

    def abort(self, group: int) -> list[Completion]:
        self._usable()
        gone = [one for one in self._groups if one.request.group == group]
        if not gone:
            return []
        rows = [row for row in self._work.values() if any(row.group is one for one in gone)]
        states = self._llm.output_processor.request_states
        aborted = [self._completion(row, partial_output(states[row.internal]), "abort") for row in rows]
        try:
            self._llm.abort_request([row.internal for row in rows], internal=True)
        except Exception as error:
            raise self._ended("while aborting", error) from error
        for row in rows:
            del self._work[row.name]
        aborted += [self._empty(one, sample) for one in gone for sample in one.waiting]
        self._groups = [one for one in self._groups if one.request.group != group]
        self._waiting = [entry for entry in self._waiting if entry[0] != group]
        heapq.heapify(self._waiting)
        self._counts.aborted_tokens += sum(len(completion.token_ids) for completion in aborted)
        return sorted(aborted, key=lambda completion: completion.sample)

    def groups_in_flight(self) -> list[GroupInFlight]:
        states = self._llm.output_processor.request_states
        tokens = {id(group): group.tokens for group in self._groups}
        oldest = {id(group): group.oldest for group in self._groups}
        for row in self._work.values():
            state, group = states[row.internal], id(row.group)
            tokens[group] += state.detokenizer.num_output_tokens()
            if state.weight_version_starts:
                first, known = int(state.weight_version_starts[0][0]), oldest[group]
                oldest[group] = first if known is None else min(first, known)
        groups = [GroupInFlight(group=one.request.group, tokens=tokens[id(one)], oldest_version=oldest[id(one)]) for one in self._groups]
        return sorted(groups, key=lambda one: one.group)

    def load_weights(self, version: int, tensors: Iterable[TensorBytes]) -> None:
        self._usable()
        began = time.perf_counter()
        held = check_tensors(tensors, self._shapes, version=version)
        try:
            swap(self._llm, version, held, clear_cache=not self._keep, shared=self._shared, own_process=self._own_process)
            if self._cache_sleeps:
                self._llm.engine_core.wake_up(["kv_cache"])
                self._cache_sleeps = False
        except Exception as error:
            raise self._ended(f"while loading weights version {version}", error) from error
        self.version = version
        self._counts.loaded(time.perf_counter() - began, in_flight=bool(self._work))

    def sleep(self) -> None:
        """Free weights, keys and values (vLLM's level 2): the next weights come from the log, so that these need not be kept."""
        self._usable()
        assert self.idle, "an engine with groups in hand does not sleep"
        try:
            self._llm.engine_core.sleep(2)  # not `LLMEngine.sleep`, which tells vLLM's own loggers
        except Exception as error:
            raise self._ended("while falling asleep", error) from error
        self.version, self._cache_sleeps = DIRECTORY_VERSION, True

    def wake(self) -> None:
        """Take memory for the weights; that for keys and values comes once they are loaded, which takes memory of its own."""
        self._usable()
        try:
            self._llm.engine_core.wake_up(["weights"])
        except Exception as error:
            raise self._ended("while waking up", error) from error

    def stats(self) -> dict[str, float]:
        return self._counts.all()

    def close(self) -> None:
        """End vLLM and its processes."""
        with contextlib.suppress(Exception):  # it may be dead already
            self._llm.engine_core.shutdown()
        self._broken = self._broken or "this engine is closed"
        self._groups, self._waiting, self._work = [], [], {}
        del self._llm.output_processor, self._llm.engine_core
        with contextlib.suppress(AttributeError):
            del self._llm.model_executor
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _hand_over(self) -> None:
        """Fill vLLM's rows, lowest group first; the surplus waits here, where it costs nothing to abort and takes the newest weights."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        while self._waiting and len(self._work) < self._concurrency:
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
                prompt["cache_salt"] = str(self.version)  # else a new sample would begin on an old version's keys and values
            name = str(next(self._ids))
            internal = self._llm.add_request(name, prompt, parameters)
            self._work[name] = Row(name=name, internal=internal, group=group, sample=sample, started_ns=time.time_ns())

    def _answered(self) -> bool:
        """Wait a little for the engine's process; whether it has put out anything."""
        queue = self._llm.engine_core.outputs_queue
        with queue.not_empty:
            return bool(queue.queue) or (queue.not_empty.wait(WAIT_S) and bool(queue.queue))

    def _finished(self, output: Any) -> Completion:
        row, drawn = self._work.pop(output.request_id), output.outputs[0]
        if drawn.finish_reason not in ("stop", "length"):
            raise self._ended("while drawing", RuntimeError(f"vLLM ended a sample with {drawn.finish_reason!r}"))
        completion = self._completion(row, drawn, "length" if drawn.finish_reason == "length" else "stop")
        group = row.group
        group.left -= 1
        group.tokens += len(completion.token_ids)
        group.oldest = completion.spans[0].version if group.oldest is None else min(group.oldest, completion.spans[0].version)
        self._counts.tokens += len(completion.token_ids)
        if not group.left:
            self._groups = [one for one in self._groups if one is not group]
            self._counts.groups += 1
        return completion

    def _completion(self, row: "Row", drawn: Any, finish: Finish) -> Completion:
        ids = np.array(drawn.token_ids, dtype=np.int32)
        logprobs, support = logprobs_and_support(drawn.logprobs, len(ids), limited=row.group.request.sampling.limited)
        spans = tuple(Span(int(span.version), span.start) for span in drawn.weight_versions or () if span.end > span.start)
        if len(logprobs) != len(ids) or (len(ids) and not spans):
            raise self._ended(
                "while drawing", RuntimeError(f"{len(ids)} tokens came with {len(logprobs)} logprobs and {len(spans)} versions")
            )
        if not np.isfinite(logprobs).all():
            raise self._ended("while drawing", RuntimeError(f"weights version {spans[-1].version} gives logits that are not numbers"))
        if finish == "length" and int(ids[-1]) in row.group.request.sampling.stop_ids:
            finish = "stop"
        return Completion(
            group=row.group.request.group, sample=row.sample, token_ids=ids, logprobs=logprobs, finish=finish,
            spans=spans or (Span(self.version, 0),), started_ns=row.started_ns, ended_ns=time.time_ns(), support=support,
        )  # fmt: skip

    def _empty(self, group: "Group", sample: int) -> Completion:
        now = time.time_ns()
        return Completion(
            group=group.request.group, sample=sample, token_ids=np.zeros(0, dtype=np.int32), logprobs=np.zeros(0, dtype=np.float32),
            finish="abort", spans=(Span(self.version, 0),), started_ns=now, ended_ns=now,
        )  # fmt: skip

    def _usable(self) -> None:
        if self._dead.is_set() and self._broken is None:
            raise self._ended("between two steps", RuntimeError("nothing more is known"))
        if self._broken is not None:
            raise EngineError(self._broken)

    def _ended(self, when: str, error: Exception) -> EngineError:
        """The engine is of no use from here on; the error that says so, with the cause."""
        if isinstance(error, EngineError):
            return error
        cause = one_line(error)
        if self._own_process:
            if self._dead.is_set():  # seen by its closed pipe, a moment before its exit code can be had
                for process in self._processes:
                    process.join(EXIT_S)
            codes = [process.exitcode for process in self._processes]
            if self._dead.is_set() or any(code is not None for code in codes):
                cause = f"its process ended with exit code {next((code for code in codes if code is not None), 'unknown')}"
        self._broken = f"vLLM failed {when} ({cause}): the worker has to start again; what vLLM said before stands in its log"
        return EngineError(self._broken)
