"""Effect of each loss's defaults on the gradient when engine and trainer have the same weights.

    python -m benchmarks at_unchanged_weights                     # a random model of 97 million parameters
    python -m benchmarks at_unchanged_weights --model DIR         # another one, SmolLM2 for example

The engine generates in bfloat16; the trainer computes the logprobs in bfloat16 and in float32, so that all differences are rounding.
For each loss, schedule and trainer the table has, over tokens: the weight of each token's gradient relative to the plain policy gradient,
as effective sample size and as the share without gradient; the share that the loss clips; and the share that its correction cuts or masks.
`--editions 1 2` compares two versions of the defaults, `--float32-head` sets `model.float32_head`.
"""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.support.command import parser_of, with_numbers
from penstock.infra.backends.base import TokenBatch
from penstock.infra.engines.base import Completion, GroupRequest, Sampling
from penstock.pipeline.algorithms.losses import summarise, token_weights
from penstock.pipeline.algorithms.registry import LOSSES
from penstock.pipeline.config.load import from_table
from penstock.pipeline.config.run_config import Config
from penstock.pipeline.learner.micro_batches import TokenSequence, pack
from penstock.pipeline.learner.train_step import Objective
from penstock.pipeline.runtime.factories import make_backend, make_engine
from penstock.pipeline.scheduling.rules import MODES

PROMPT_TOKENS = 16
AT_LEAST_ESS, AT_MOST_LOST = 0.95, 0.01
"""What a default may cost at unchanged weights: effective sample size, and share of tokens clipped, cut or masked."""
RANDOM_MODEL = {
    "vocab_size": 8192, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12,
    "num_key_value_heads": 12, "max_position_embeddings": 4096, "tie_word_embeddings": False,
}  # fmt: skip


def main(arguments: Sequence[str]) -> None:
    """Generate, recompute, and print a table for each format of the trainer."""
    parser = parser_of(__name__, __doc__)
    parser.add_argument("--model", type=Path, help="a model directory; a random model if absent")
    parser.add_argument("--engine", default="transformers", help="rollout.engine")
    parser.add_argument("--float32-head", action="store_true")
    with_numbers(parser, samples=8, tokens=512)
    parser.add_argument("--editions", type=int, nargs="+", default=[2], help="algorithm.defaults, several to compare")
    chosen = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        model = chosen.model or make_random_model(Path(scratch) / "model")
        head = chosen.float32_head
        completions = list(generate(model, engine=chosen.engine, samples=chosen.samples, tokens=chosen.tokens, float32_head=head))
        for dtype in ("bfloat16", "float32"):
            batch, logprobs = recomputed(model, completions, dtype=dtype, tokens=chosen.tokens, float32_head=head)
            difference = (logprobs - batch.behaviour_logprobs)[batch.completion_mask]
            print(f"\n{chosen.engine} in bfloat16, trainer in {dtype}, {len(completions)} x {chosen.tokens} tokens")
            print(f"logprobs differ by {difference.std():.4f} (standard deviation of a token), {np.abs(difference).max():.3f} at most\n")
            print("| defaults | loss | mode | S | proximal + correction | ESS | no gradient | clipped | cut or masked | |")
            print("|---" * 10 + "|")
            for edition in chosen.editions:
                for line in rows(batch, logprobs, dtype=dtype, edition=edition, tokens=chosen.tokens):
                    print(f"| {edition} | {' | '.join(line)} |", flush=True)


def make_random_model(directory: Path) -> Path:
    """Write a Llama of 97 million random parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**RANDOM_MODEL)).save_pretrained(directory)  # type: ignore[arg-type]
    return directory


def config_of(
    model: Path | str, *, tokens: int, trainer: str = "float32", engine: str = "transformers", float32_head: bool = False, **sections: Any
) -> Config:
    """A run of that model whose engine computes in bfloat16."""
    return from_table({
        "run": {"steps": 1}, "model": {"path": str(model), "float32_head": float32_head}, "data": {"source": "/none.jsonl"},
        "sampling": {"max_new_tokens": tokens},
        "rollout": {"engine": engine, "dtype": "bfloat16", "device": "cpu", "concurrency": 8},
        "trainer": {"dtype": trainer, "device": "cpu"}, **sections,
    })  # fmt: skip


def generate(
    model: Path, *, engine: str, samples: int, tokens: int, float32_head: bool
) -> Iterator[tuple[np.ndarray[Any, Any], Completion]]:
    """(prompt, completion) of random prompts, four samples each; no token ends a sample."""
    random, vocabulary = np.random.default_rng(0), 4096
    opened = make_engine(config_of(model, tokens=tokens, engine=engine, float32_head=float32_head))
    how = Sampling(max_new_tokens=tokens, stop_ids=())
    for group in range(-(-samples // 4)):
        prompt = random.integers(10, vocabulary, PROMPT_TOKENS).astype(np.int32)
        opened.submit(GroupRequest(group=group, prompt_ids=prompt, samples=tuple(range(4)), rows=4, seed=0, sampling=how))
        left = 4
        while left:
            for completion in opened.step():
                left -= 1
                yield prompt, completion
    with suppress(RuntimeError):
        opened.close()


def recomputed(
    model: Path, completions: list[tuple[np.ndarray[Any, Any], Completion]], *, dtype: str, tokens: int, float32_head: bool
) -> tuple[TokenBatch, np.ndarray[Any, Any]]:
    """The samples as one batch, and [B, L-1] the trainer's logprobs of their tokens; advantages are 1 and -1 in turn."""
    sequences = [
        TokenSequence(
            group=each.group, sample=each.sample, prompt_ids=prompt, completion_ids=each.token_ids, behaviour_logprobs=each.logprobs,
            loss_mask=np.ones(len(each.token_ids), np.bool_), advantage=1.0 if number % 2 else -1.0,
        )
        for number, (prompt, each) in enumerate(completions)
    ]  # fmt: skip
    config = config_of(
        model,
        tokens=tokens,
        trainer=dtype,
        algorithm={"proximal": "snapshot"},
        schedule={"steps_per_version": 2},
        float32_head=float32_head,
    )
    backend = make_backend(config, steps=1)
    logprobs = np.concatenate([backend.snapshot_logprobs(pack([sequence])) for sequence in sequences])
    backend.close()
    return pack(sequences), logprobs


def rows(batch: TokenBatch, logprobs: np.ndarray[Any, Any], *, dtype: str, edition: int, tokens: int) -> Iterator[list[str]]:
    """A line of the table for every loss, and for the schedules that resolve to the same corrections."""
    cases: dict[tuple[str, str, str], tuple[Config, list[str]]] = {}
    for loss, mode, per_version in product(LOSSES, MODES, (1, 4)):
        engine = "vllm" if mode in ("in_flight", "bounded") else "transformers"
        schedule = {"mode": mode, "steps_per_version": per_version}
        algorithm = {"loss": loss, "defaults": edition}
        config = config_of("/none", tokens=tokens, trainer=dtype, engine=engine, schedule=schedule, algorithm=algorithm)
        resolved = f"{config.proximal}" + ("" if config.correction == "none" else f" + {config.correction}")
        cases.setdefault((loss, str(per_version), resolved), (config, []))[1].append(mode)
    for (loss, per_version, resolved), (config, modes) in cases.items():
        ess, idle, clipped, corrected = measured(config, batch, logprobs)
        sound = ess >= AT_LEAST_ESS and max(idle, clipped, corrected) <= AT_MOST_LOST
        shares = [f"{share:.2%}" for share in (idle, clipped, corrected)]
        yield [loss, ", ".join(modes), per_version, resolved, f"{ess:.4f}", *shares, "" if sound else "too much"]


def measured(config: Config, batch: TokenBatch, logprobs: np.ndarray[Any, Any]) -> tuple[float, float, float, float]:
    """Effective sample size of the gradient's weights, and shares of tokens without gradient, clipped, cut or masked."""
    objective, current = Objective.of(config), torch.tensor(logprobs, requires_grad=True)
    near = {"behaviour": batch.behaviour_logprobs, "snapshot": logprobs, "current": None}[config.proximal]
    loss, stats = objective.batch_loss(current, batch, proximal=near)
    loss.backward()
    mask = torch.tensor(batch.completion_mask)
    plain = -torch.tensor(batch.advantages)[:, None] * token_weights(
        mask, aggregate=config.aggregate, max_tokens=config.sampling.max_new_tokens
    )
    assert current.grad is not None
    weights = (current.grad[mask] / plain[mask]).double()
    summary = summarise(stats | {"denominator": 1.0})
    ess = float(weights.sum() ** 2 / (len(weights) * (weights**2).sum()))
    return ess, float((weights == 0).double().mean()), summary["clip_fraction"], summary.get("corrected_fraction", 0.0)
