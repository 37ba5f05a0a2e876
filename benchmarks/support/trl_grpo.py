"""TRL's `GRPOTrainer` on the task of examples/smollm2.toml, a script for an environment without Penstock.

Prints a line of JSON for each optimizer step (wall seconds, seconds of generation, mean reward) and one with the peak memory and the
held-out greedy accuracy before the first step, after every `--every` steps and after the last; evaluation is not counted in the times.
"""

import argparse
import json
import os
import resource
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))


def arguments() -> argparse.Namespace:
    """Settings of the search, and settings that both sides share."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    integers = {"steps": 8, "groups": 4, "samples": 8, "tokens": 16, "threads": 2, "rows": 0, "held-out": 200, "every": 20, "seed": 0}
    for name, default in {**integers, "warmup": 5, "lr": 2e-5}.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--autocast", action="store_true", help="TRL's own bf16=True, on float32 weights")
    return parser.parse_args()


def main() -> None:
    """Evaluate, train, evaluate."""
    chosen = arguments()
    os.environ.update(OMP_NUM_THREADS=str(chosen.threads), HF_HUB_OFFLINE="1", CUDA_VISIBLE_DEVICES="")
    import datasets
    import torch
    from arithmetic import last_number, sums
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(chosen.threads)
    model = AutoModelForCausalLM.from_pretrained(chosen.model, dtype=getattr(torch, chosen.dtype))
    tokenizer = AutoTokenizer.from_pretrained(chosen.model)
    now = {"generation": 0.0, "reward": 0.0, "started": 0.0}

    def prompts(rows: list[dict[str, str]]) -> list[dict[str, object]]:
        return [{"prompt": [{"role": "user", "content": row["prompt"]}], "answer": row["answer"]} for row in rows]

    def reward(completions: list[object], answer: list[str], **_: object) -> list[float]:
        rewards = last_number(completions, answer)
        now["reward"] = sum(rewards) / len(rewards)
        return rewards

    def accuracy() -> float:
        right, rows = 0.0, sums(seed=chosen.seed, split="held_out")[: chosen.held_out]
        for start in range(0, len(rows), 50):
            part = rows[start : start + 50]
            texts = [tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=False) for row in prompts(part)]
            batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
            with torch.no_grad():
                completions = model.generate(**batch, do_sample=False, max_new_tokens=chosen.tokens, pad_token_id=tokenizer.pad_token_id)
            words = tokenizer.batch_decode(completions[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
            right += sum(last_number(words, [row["answer"] for row in part]))
        return right / len(rows)

    steps: list[float] = []
    evaluations: list[dict[str, float]] = []

    def evaluate() -> None:
        model.eval()
        evaluations.append({"step": len(steps), "seconds": sum(steps), "accuracy": accuracy()})
        model.train()

    class Timed(GRPOTrainer):
        def _generate_and_score_completions(self, *positional: object, **named: object) -> object:
            started = time.perf_counter()
            scored = super()._generate_and_score_completions(*positional, **named)
            now["generation"] += time.perf_counter() - started
            return scored

    class Steps(TrainerCallback):
        def on_train_begin(self, *_: object, **__: object) -> None:
            now["started"] = time.perf_counter()

        def on_step_end(self, *_: object, **__: object) -> None:
            took = time.perf_counter() - now["started"]
            print(json.dumps({"wall": took, "generation": now["generation"], "reward": now["reward"]}), flush=True)
            steps.append(took)
            if chosen.held_out and (len(steps) % chosen.every == 0 or len(steps) == chosen.steps):
                evaluate()
            now.update(generation=0.0, started=time.perf_counter())

    size = chosen.groups * chosen.samples
    rows = chosen.rows or size
    config = GRPOConfig(
        output_dir=os.environ.get("TMPDIR", "/tmp") + "/trl", use_cpu=True, bf16=chosen.autocast, gradient_checkpointing=False,
        per_device_train_batch_size=rows, gradient_accumulation_steps=size // rows, num_generations=chosen.samples, num_iterations=1,
        max_completion_length=chosen.tokens, temperature=1.0, beta=0.0, loss_type="dapo", learning_rate=chosen.lr,
        lr_scheduler_type="constant_with_warmup", warmup_steps=chosen.warmup, max_steps=chosen.steps, weight_decay=0.0, max_grad_norm=1.0,
        adam_beta2=0.95, logging_steps=10**6, save_strategy="no", report_to="none", disable_tqdm=True, seed=chosen.seed,
    )  # fmt: skip
    trainer = Timed(
        model=model, processing_class=tokenizer, reward_funcs=reward, args=config, callbacks=[Steps()],
        train_dataset=datasets.Dataset.from_list(prompts(sums(seed=chosen.seed))),
    )  # fmt: skip
    if chosen.held_out:
        evaluate()
    trainer.train()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(json.dumps({"evaluations": evaluations, "peak_gib": peak}), flush=True)


if __name__ == "__main__":
    main()
