"""The trainer's steps on one model and the same samples: padded rows, shared prompts, shared prompts in bfloat16.

    python benchmarks/trainer_forward.py .penstock/smollm2 [--rounds 5] [--groups 4] [--samples 8]

Each way runs in a process of its own, which waits while another one computes: they alternate, one step at a time, on the same groups of
sums. Prompts go through the model's chat template; of the answers of 3 to 21 tokens some begin alike, and all end differently. Printed are
samples a second of the median step, by wall clock and by CPU time, peak resident memory of the process, tokens, and how far losses and
gradient norms are from those of padded rows.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

WAYS = {"padded": ("float32", "off"), "shared": ("float32", "on"), "shared, bfloat16": ("bfloat16", "on")}


def groups(model: str, *, count: int, samples: int, step: int) -> Any:
    """One micro-batch: questions of the example, and answers that agree in their first tokens."""
    import numpy as np
    from transformers import AutoTokenizer

    from examples.arithmetic import sums
    from penstock.pipeline.learner.training_samples import TokenSequence, pack

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
    """One way: a step for each line on stdin, its figures as a line on stdout."""
    from penstock.infra.backends.registry import open_backend
    from penstock.pipeline.algorithms.losses import batch_loss

    dtype, share = WAYS[options.way]
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


def main() -> None:
    """Alternate the ways and print what each took, beside padded rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    for name, default in (("rounds", 5), ("groups", 4), ("samples", 8), ("threads", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        serve(options)
        return
    command = [sys.executable, "-m", "benchmarks.trainer_forward", *sys.argv[1:], "--way"]
    root = Path(__file__).resolve().parents[1]
    ways = {way: subprocess.Popen([*command, way], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root) for way in WAYS}
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    forwards = {way: json.loads(_line(process))["forward"] for way, process in ways.items()}
    for step in range(options.rounds + 1):
        for way, process in list(ways.items())[:: 1 if step % 2 else -1]:
            assert process.stdin is not None
            print(step, file=process.stdin, flush=True)
            found[way].append(json.loads(_line(process)))
    for process in ways.values():
        process.communicate()
    for way, steps in found.items():
        samples, rest = options.groups * options.samples, steps[1:]  # the first step makes the optimizer's state
        rates = [samples / statistics.median(step[clock] for step in rest) for clock in ("wall", "cpu")]
        base = samples / statistics.median(step["cpu"] for step in found["padded"][1:])
        pairs = list(zip(steps, found["padded"], strict=True))
        gap, norm = (max(abs(step[name] - other[name]) / abs(other[name]) for step, other in pairs) for name in ("loss", "norm"))
        speed = f"{rates[0]:6.2f} samples/s, {rates[1]:6.2f} a CPU second ({rates[1] / base:.1f} x padded)"
        tokens = f"{int(steps[-1]['computed'])} tokens computed for {int(steps[-1]['padded'])} padded"
        apart = f"losses within {gap:.1e}, gradient norms {norm:.1e}"
        print(f"{way:17} {speed}, peak {steps[-1]['peak']:.2f} GiB, {tokens}, {apart}; {forwards[way]}")


def _line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline()


if __name__ == "__main__":
    main()
