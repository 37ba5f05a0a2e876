"""vLLM with new weights between decode steps: labels against the trainer's forward pass, stalls, and its sleep."""

import time
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from penstock.gpu_check.figures import Figure, Machine, Skipped
from penstock.gpu_check.models import SHAPES, random_model
from penstock.infra.backends.torch_backend import TorchBackend
from penstock.infra.engines.base import Completion, Engine, EngineSettings, GroupRequest, Sampling
from penstock.infra.engines.registry import ENGINES
from penstock.infra.engines.shared_device import Sleepable
from penstock.infra.tensors.stream import TensorBytes
from penstock.infra.tensors.torch_copy import tensor_bytes
from penstock.pipeline.learner.micro_batches import TokenSequence, pack

ENGINES_ON: dict[str, tuple[tuple[Literal["bfloat16", "float32"], Literal["keep", "recompute"], bool], ...]] = {
    "cuda": (("bfloat16", "keep", False), ("bfloat16", "recompute", True), ("float32", "recompute", True)),
    "cpu": (("float32", "keep", True),),
}
"""Device -> dtype, `kv_cache` and `enforce_eager` of each engine; compiling and capturing CUDA graphs takes a minute."""
SWAPS = 20
WEIGHTS = 3
"""Number of different weights; version v has those of v % WEIGHTS, so that a label of a neighbouring version is wrong."""
NOISE = 0.3
LABEL_NATS = {"bfloat16": 0.05, "float32": 1e-4}
QUANTILE = {"bfloat16": 0.99, "float32": 1.0}
"""dtype -> share of the tokens for which `LABEL_NATS` holds; a wrong label is off by more, over a span of several percent."""
STALL_S_PER_GB = 0.3
ROWS, PROMPT = 4, 40


def vllm(here: Machine) -> Iterator[Figure]:
    """Samples in flight over 20 weight updates, with both treatments of the KV cache; on a GPU also in bfloat16, and asleep and back."""
    if find_spec("vllm") is None:
        raise Skipped("vLLM IS NOT INSTALLED: nothing of its engine was checked")
    shape = "0.5B" if here.on_gpu else "tiny"
    for dtype, kv_cache, eager in ENGINES_ON[here.device.type]:
        path = random_model(here.folder, shape=shape, dtype=dtype, device=here.device)
        trainer = TorchBackend(model_path=str(path), lr=1e-6, dtype=dtype, device=here.device.type)
        versions = [_weights(trainer, number) for number in range(WEIGHTS)]
        settings = EngineSettings(
            directory=path, dtype=dtype, device="auto" if here.on_gpu else "cpu", concurrency=64, longest=256, kv_cache=kv_cache,
            engine_process=here.on_gpu, sleeps=here.on_gpu,
            arguments={"gpu_memory_utilization": 0.3, "enforce_eager": eager} if here.on_gpu else {},
        )  # fmt: skip
        started = time.perf_counter()
        engine = ENGINES["vllm"].open(settings)
        try:
            label = f"{dtype}, {kv_cache}{', eager' if eager else ''}: "
            yield Figure(name=f"{label}start", value=time.perf_counter() - started, unit="s")
            yield from _updated(engine, trainer, versions, here=here, settings=settings)
            if here.on_gpu and not eager:
                yield from _slept(engine, trainer, versions, here=here, settings=settings)
        finally:
            engine.close()
            trainer.close()


def _weights(trainer: TorchBackend, number: int) -> list[TensorBytes]:
    """The initial weights with noise."""
    weights = []
    for name, parameter in trainer.model.named_parameters():
        random = torch.Generator(parameter.device).manual_seed(number)
        noise = torch.randn(parameter.shape, generator=random, device=parameter.device, dtype=parameter.dtype)
        weights.append(tensor_bytes(name, parameter + NOISE * parameter.abs().mean() * noise))
    return weights


def _requests(groups: int, tokens: int, vocabulary: int) -> list[GroupRequest]:
    random = np.random.default_rng(0)
    return [
        GroupRequest(
            group=group, prompt_ids=random.integers(0, vocabulary, PROMPT).astype(np.int32), samples=tuple(range(ROWS)), rows=ROWS, seed=1,
            sampling=Sampling(max_new_tokens=tokens, stop_ids=()),
        )
        for group in range(groups)
    ]  # fmt: skip


def _updated(
    engine: Engine, trainer: TorchBackend, versions: Sequence[Sequence[TensorBytes]], *, here: Machine, settings: EngineSettings
) -> Iterator[Figure]:
    """Generate with an update every few steps; whose labels and stalls are the figures."""
    groups, tokens, every = (16, 160, 6) if here.on_gpu else (4, 60, 2)
    requests = _requests(groups, tokens, _vocabulary(here))
    engine.load_weights(0, versions[0])

    def update(steps: int) -> None:
        if steps % every == 0 and engine.version < SWAPS and not engine.idle:
            engine.load_weights(engine.version + 1, versions[(engine.version + 1) % WEIGHTS])

    started = time.perf_counter()
    completions = _generated(engine, requests, after_step=update)
    elapsed = time.perf_counter() - started
    stats, size = engine.stats(), sum(tensor.nbytes for tensor in versions[0]) / 1e9
    yield Figure(name="updates with samples in flight", value=stats["swaps"], at_least=SWAPS)
    yield Figure(name="generation with them", value=groups * ROWS * tokens / elapsed, unit="tokens/s")
    yield Figure(name="versions in a sample", value=max(len(completion.spans) for completion in completions), at_least=2)
    lost = groups * ROWS * tokens - sum(len(completion.token_ids) for completion in completions)
    yield Figure(name="lost tokens", value=lost, at_least=0, at_most=0)
    # With a kept KV cache, tokens after an update depend on older weights too.
    first_only = settings.kv_cache == "keep"
    errors = np.concatenate(_errors(trainer, versions, requests, completions, first_only=first_only))
    yield from _label_figures(errors, settings.dtype)
    yield Figure(name="mean stall", value=stats["swap_stall_s"] / max(1.0, stats["swaps"]), unit="s")
    yield Figure(name="longest", value=stats["swap_stall_max_s"], unit="s", at_most=here.limit(STALL_S_PER_GB * max(1.0, size)))


def _slept(
    engine: Engine, trainer: TorchBackend, versions: Sequence[Sequence[TensorBytes]], *, here: Machine, settings: EngineSettings
) -> Iterator[Figure]:
    """Free the memory, allocate it again, load weights, and generate with true labels."""
    assert isinstance(engine, Sleepable)
    before = torch.cuda.mem_get_info(here.device)[0]
    engine.sleep()
    yield Figure(name="memory freed by sleep", value=(torch.cuda.mem_get_info(here.device)[0] - before) / 1e9, unit="GB", at_least=1.0)
    engine.wake()
    engine.load_weights(SWAPS + 1, versions[(SWAPS + 1) % WEIGHTS])
    requests = _requests(2, 32, _vocabulary(here))
    completions = _generated(engine, requests)
    yield from _label_figures(np.concatenate(_errors(trainer, versions, requests, completions, first_only=False)), settings.dtype)


def _generated(engine: Engine, requests: Sequence[GroupRequest], *, after_step: Callable[[int], None] = lambda _: None) -> list[Completion]:
    """All completions of the requests; `after_step` gets the number of steps so far."""
    for request in requests:
        engine.submit(request)
    completions: list[Completion] = []
    steps = 0
    while not engine.idle:
        completions += engine.step()
        steps += 1
        after_step(steps)
    return completions


def _label_figures(errors: npt.NDArray[np.float32], dtype: str) -> Iterator[Figure]:
    yield Figure(name="labels against the trainer, mean", value=float(errors.mean()), unit="nats")
    share = QUANTILE[dtype]
    yield Figure(name=f"{share:.0%} of the tokens within", value=float(np.quantile(errors, share)), unit="nats", at_most=LABEL_NATS[dtype])


def _errors(
    trainer: TorchBackend,
    versions: Sequence[Sequence[TensorBytes]],
    requests: Sequence[GroupRequest],
    completions: Sequence[Completion],
    *,
    first_only: bool,
) -> list[npt.NDArray[np.float32]]:
    """Differences of the tokens' logprobs from the trainer's under the weights of their labels; `first_only`: of each first span."""
    errors = []
    for number, weights in enumerate(versions):
        trainer.load_weights(weights)
        for request in requests:
            members = [completion for completion in completions if completion.group == request.group]
            batch = pack([_sequence(request, completion) for completion in members])
            for completion, logprobs in zip(members, trainer.logprobs(batch), strict=True):
                expected = logprobs[PROMPT - 1 : PROMPT - 1 + len(completion.token_ids)]
                ends = [*(span.start for span in completion.spans[1:]), len(completion.token_ids)]
                for span, end in list(zip(completion.spans, ends, strict=True))[: 1 if first_only else None]:
                    if span.version % WEIGHTS == number:
                        errors.append(np.abs(expected[span.start : end] - completion.logprobs[span.start : end]))
    return errors


def _sequence(request: GroupRequest, completion: Completion) -> TokenSequence:
    return TokenSequence(
        group=request.group, sample=completion.sample, prompt_ids=request.prompt_ids, completion_ids=completion.token_ids,
        behaviour_logprobs=completion.logprobs, loss_mask=np.ones(len(completion.token_ids), np.bool_), advantage=0.0,
    )  # fmt: skip


def _vocabulary(here: Machine) -> int:
    return int(SHAPES["0.5B" if here.on_gpu else "tiny"]["vocab_size"])
