"""Trainer steps on one model and the same samples: padded rows, shared prompts, shared prompts in bfloat16.

    python -m benchmarks speed trainer .penstock/smollm2 [--rounds 5] [--groups 4] [--samples 8]

Each variant runs in a process of its own; they alternate, one step at a time, on the same groups of sums. Prompts go through the model's
chat template; the completions have 3 to 21 tokens, some share a prefix, and all end differently. Prints samples a second of the median
step, by wall clock and by CPU time, peak resident memory, tokens, and the deviation of losses and gradient norms from padded rows.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.support.command import ROOT, command_of, parser_of, with_numbers

VARIANTS = {"padded": ("float32", "off"), "shared": ("float32", "on"), "shared, bfloat16": ("bfloat16", "on")}


def groups(model: str, *, count: int, samples: int, step: int) -> Any:
    """One micro-batch: prompts of the example, and completions that share their first tokens."""
    import numpy as np
    from transformers import AutoTokenizer

    from examples.arithmetic import sums
    from penstock.pipeline.learner.micro_batches import TokenSequence, pack

    random, tokenizer, rows = np.random.default_rng(step), AutoTokenizer.from_pretrained(model), sums()
    made = []
    for group in range(count):
        row = rows[(step * count + group) % len(rows)]
        prompt = tokenizer.apply_chat_template([{"role": "user", "content": row["prompt"]}], add_generation_prompt=True, return_dict=False)
        for sample in range(samples):
            text = ("", "The answer is ", "12 + 3 = ")[sample % 3]
            tail = random.integers(100, len(tokenizer), random.integers(2, 13)).tolist()
            ids = np.array([*(tokenizer(text).input_ids if text else ()), *tail, tokenizer.eos_token_id], np.int32)
            made.append(TokenSequence(
                group=group, sample=sample, prompt_ids=np.array(prompt, np.int32), completion_ids=ids, advantage=float(random.normal()),
                behaviour_logprobs=np.full(len(ids), -1.0, np.float32), loss_mask=np.ones(len(ids), np.bool_),
            ))  # fmt: skip
    return pack(made)


def serve(options: argparse.Namespace) -> None:
    """One variant: a step for each line on stdin, its figures as a line on stdout."""
    from penstock.infra.backends.registry import open_backend
    from penstock.pipeline.algorithms.losses import batch_loss

    dtype, share = VARIANTS[options.variant]
    backend = open_backend("torch", model_path=options.model, lr=1e-6, dtype=dtype, share_prompts=share, threads=options.threads)
    print(json.dumps({"forward": backend.fingerprint()["forward"]}), flush=True)
    for line in sys.stdin:
        batch = groups(options.model, count=options.groups, samples=options.samples, step=int(line))
        wall, cpu = time.perf_counter(), time.process_time()
        stats = backend.backward(batch, lambda logprobs: batch_loss(logprobs, batch, proximal=batch.behaviour_logprobs))  # noqa: B023
        norm = backend.step(denominator=float(batch.tokens)).grad_norm
        took = time.perf_counter() - wall, time.process_time() - cpu
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        figures = {"wall": took[0], "cpu": took[1], "loss": stats["loss_sum"] / batch.tokens, "norm": norm, "peak": peak}
        print(json.dumps(figures | {"computed": stats["computed_tokens"], "padded": batch.input_ids.size}), flush=True)


def main(arguments: Sequence[str]) -> None:
    """Alternate the variants and print each relative to padded rows."""
    parser = parser_of(__name__, __doc__)
    parser.add_argument("model")
    with_numbers(parser, rounds=5, groups=4, samples=8, threads=1)
    parser.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.variant:
        serve(options)
        return
    command = [*command_of(__name__), *arguments, "--variant"]
    variants = {
        name: subprocess.Popen([*command, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) for name in VARIANTS
    }
    figures: dict[str, list[dict[str, float]]] = {name: [] for name in VARIANTS}
    forwards = {name: json.loads(_line(process))["forward"] for name, process in variants.items()}
    for step in range(options.rounds + 1):
        for name, process in list(variants.items())[:: 1 if step % 2 else -1]:
            assert process.stdin is not None
            print(step, file=process.stdin, flush=True)
            figures[name].append(json.loads(_line(process)))
    for process in variants.values():
        process.communicate()
    for name, steps in figures.items():
        samples, rest = options.groups * options.samples, steps[1:]  # the first step makes the optimizer's state
        rates = [samples / statistics.median(step[clock] for step in rest) for clock in ("wall", "cpu")]
        base = samples / statistics.median(step["cpu"] for step in figures["padded"][1:])
        pairs = list(zip(steps, figures["padded"], strict=True))
        gap, norm = (max(abs(step[key] - other[key]) / abs(other[key]) for step, other in pairs) for key in ("loss", "norm"))
        speed = f"{rates[0]:6.2f} samples/s, {rates[1]:6.2f} a CPU second ({rates[1] / base:.1f} x padded)"
        tokens = f"{int(steps[-1]['computed'])} tokens computed for {int(steps[-1]['padded'])} padded"
        deviation = f"losses within {gap:.1e}, gradient norms {norm:.1e}"
        print(f"{name:17} {speed}, peak {steps[-1]['peak']:.2f} GiB, {tokens}, {deviation}; {forwards[name]}")


def _line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline()
