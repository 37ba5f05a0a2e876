"""What the engine on vLLM costs beside bare vLLM, and what swaps of weights in flight cost: tokens per second and the stall of a swap.

    python benchmarks/engine_swaps.py --rounds 5

Four variants on the same prompts: vLLM's own `LLMEngine` driven directly, `VllmEngine`, and `VllmEngine` with new weights every half
second, keys and values kept or computed anew. They alternate within every round, so that a machine whose speed drifts treats them
alike; ratios are taken within a round, figures are medians over the rounds.
"""

import argparse
import atexit
import itertools
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from random_model import SIZES, make_model

from penstock.infra.engines.base import GroupRequest, Sampling
from penstock.infra.engines.vllm.arguments import check_installed, engine_arguments
from penstock.infra.engines.vllm.engine import VllmEngine
from penstock.infra.engines.vllm.model_info import read_geometry
from penstock.infra.engines.vllm.start import start_vllm
from penstock.infra.tensors.stream import TensorBytes

ROWS = 8
VARIANTS = ["bare", "alone", "keep", "recompute"]
LIMITS = {"alone": 0.95, "keep": 0.88, "stall_ms": 100.0}


def read_tensors(directory: Path, *, scale: float) -> list[TensorBytes]:
    """The directory's weights, scaled."""
    from safetensors.torch import load_file

    values = {name: (value * scale).numpy() for name, value in load_file(directory / "model.safetensors").items()}
    return [TensorBytes(name=name, dtype="float32", shape=value.shape, data=value.tobytes()) for name, value in values.items()]


def prompts_of(round_number: int, groups: int) -> list[np.ndarray[Any, np.dtype[np.int32]]]:
    """Other prompts every round, the same for all variants of a round."""
    random = np.random.default_rng(round_number)
    return [random.integers(3, 100, 24).astype(np.int32) for _ in range(groups)]


def lengths_of(round_number: int, groups: int, tokens: int) -> list[int]:
    """Ragged lengths, so that rows end and are filled all the time."""
    return [int(n) for n in np.random.default_rng(1000 + round_number).integers(tokens // 2, tokens * 3 // 2, groups)]


def open_bare(directory: str, *, concurrency: int, longest: int, engine_process: bool) -> Any:
    """vLLM alone with the same arguments, its figures off."""
    path = Path(directory)
    arguments = engine_arguments(
        {}, directory=path, geometry=read_geometry(path), dtype="float32", seed=0, concurrency=concurrency, longest=longest,
        engine_process=engine_process, on_cpu=check_installed("auto"),
    )  # fmt: skip
    llm, scratch = start_vllm(
        arguments | {"disable_log_stats": True}, threads=1, engine_process=engine_process, on_cpu=check_installed("auto")
    )
    atexit.register(shutil.rmtree, scratch, ignore_errors=True)
    return llm


def bare(llm: Any, prompts: list[Any], lengths: list[int]) -> int:
    """Tokens that vLLM alone draws, everything submitted at once, with the logprob of every token and no seeds."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    tokens = 0
    for group, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        for row in range(ROWS):
            parameters = SamplingParams(
                temperature=1.0, max_tokens=length, ignore_eos=True, logprobs=0, flat_logprobs=True, detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )  # fmt: skip
            llm.add_request(f"{group}.{row}", {"prompt_token_ids": prompt.tolist()}, parameters)
    while llm.has_unfinished_requests():
        tokens += sum(len(output.outputs[0].token_ids) for output in llm.step() if output.finished)
    return tokens


def drawn(
    engine: VllmEngine, prompts: list[Any], lengths: list[int], *, new: Callable[[], list[TensorBytes]] | None = None, every_s: float = 0.5
) -> tuple[int, list[float]]:
    """Tokens that the engine draws, and the stall of each swap in seconds, with `new()` weights every `every_s`."""
    tokens, stalls = 0, []
    for group, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        sampling = Sampling(max_new_tokens=length, stop_ids=())
        engine.submit(GroupRequest(group=group, prompt_ids=prompt, samples=tuple(range(ROWS)), rows=ROWS, seed=0, sampling=sampling))
    swapped = time.perf_counter()
    while not engine.idle:
        tokens += sum(len(completion.token_ids) for completion in engine.step())
        if new is not None and not engine.idle and time.perf_counter() - swapped >= every_s:
            tensors, swapped = new(), time.perf_counter()
            engine.load_weights(engine.version + 1, tensors)
            stalls.append(time.perf_counter() - swapped)
    return tokens, stalls


def main() -> None:
    """Run the rounds, print figures and limits."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=80, help="tokens of a completion, on average")
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--model", choices=SIZES, default="tiny")
    parser.add_argument("--every", type=float, default=0.5, help="seconds between swaps")
    parser.add_argument("--engine-process", action="store_true")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="swaps-") as name:
        parameters = make_model(Path(name), size=chosen.model)
        versions = [read_tensors(Path(name), scale=scale) for scale in (1.0, 1.01)]
        sizes = {"concurrency": chosen.concurrency, "longest": 32 + 2 * chosen.tokens, "engine_process": chosen.engine_process}
        engine, alone = VllmEngine(name, **sizes), open_bare(name, **sizes)
        wall: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
        cpu: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
        stalls: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
        swaps = itertools.count()
        for number in range(-1, chosen.rounds):  # the first round is not counted
            prompts, lengths = prompts_of(number + 1, chosen.groups), lengths_of(number + 1, chosen.groups, chosen.tokens)
            turned = (number + 1) % len(VARIANTS)
            for variant in VARIANTS[turned:] + VARIANTS[:turned]:
                engine._keep, seen = variant == "keep", []
                began, used = time.perf_counter(), time.process_time()
                if variant == "bare":
                    tokens = bare(alone, prompts, lengths)
                else:
                    new = None if variant == "alone" else lambda: versions[next(swaps) % 2]
                    tokens, seen = drawn(engine, prompts, lengths, new=new, every_s=chosen.every)
                if number >= 0:
                    wall[variant].append(tokens / (time.perf_counter() - began))
                    cpu[variant].append(tokens / (time.process_time() - used))
                    stalls[variant] += seen
            if number >= 0:
                print(f"round {number + 1}: " + ", ".join(f"{variant} {wall[variant][-1]:.0f}" for variant in VARIANTS), flush=True)
        alone.engine_core.shutdown()
        engine.close()
    report(wall, cpu, stalls, parameters=parameters, chosen=chosen)


def report(
    wall: dict[str, list[float]],
    cpu: dict[str, list[float]],
    stalls: dict[str, list[float]],
    *,
    parameters: int,
    chosen: argparse.Namespace,
) -> None:
    """Print a line a variant and whether each limit is kept."""
    print(f"{parameters / 1e6:.2f} M parameters, {chosen.concurrency} rows, {chosen.rounds} rounds, load {os.getloadavg()[0]:.1f}")
    print(f"{'variant':<12}{'tokens/s':>10}{'ratio':>8}{'per CPU s':>12}{'ratio':>8}{'swaps':>8}{'stall ms median':>17}{'p95':>8}")
    ratio = {variant: (_ratio(wall, variant), _ratio(cpu, variant)) for variant in VARIANTS}
    for variant in VARIANTS:
        line = f"{variant:<12}{statistics.median(wall[variant]):>10.0f}{ratio[variant][0]:>8.3f}"
        line += f"{statistics.median(cpu[variant]):>12.0f}{ratio[variant][1]:>8.3f}"
        if seen := stalls[variant]:
            line += f"{len(seen):>8}{1000 * statistics.median(seen):>17.1f}{1000 * float(np.quantile(seen, 0.95)):>8.1f}"
        print(line)
    print("ratio: alone against bare, with swaps against alone; CPU seconds are this process's")
    stall = 1000 * statistics.median(stalls["keep"]) if stalls["keep"] else 0.0
    for what, value, kept in (
        (f"alone >= {LIMITS['alone']}", ratio["alone"][0], ratio["alone"][0] >= LIMITS["alone"]),
        (f"keep >= {LIMITS['keep']}", ratio["keep"][0], ratio["keep"][0] >= LIMITS["keep"]),
        (f"median stall <= {LIMITS['stall_ms']:.0f} ms", stall, stall <= LIMITS["stall_ms"]),
    ):
        print(f"{'kept' if kept else 'MISSED':<8}{what}: {value:.3f}")


def _ratio(rates: dict[str, list[float]], variant: str) -> float:
    against = rates["bare" if variant in ("bare", "alone") else "alone"]
    return statistics.median(rate / other for rate, other in zip(rates[variant], against, strict=True))


if __name__ == "__main__":
    main()
