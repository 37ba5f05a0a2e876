"""Settings of every trainer backend, validated before heavy imports, and the learning-rate schedules."""

import math
from dataclasses import dataclass
from pathlib import Path

DTYPES = ("float32", "bfloat16")
SHARE = ("auto", "on", "off")
PIECE_ELEMENTS = 2**23
"""32 MiB of float32 logits in a piece; as much again is saved for the gradient, or is the intermediate of a sum."""
PIECE_ELEMENTS_OF_GPU = 2**27
"""For each piece a GPU reads the output layer three times and adds to its float32 gradient: small pieces take longer."""
LR_SCHEDULES = ("constant", "linear", "cosine")


def learning_rate(step: int, *, lr: float, schedule: str = "constant", warmup_steps: int = 0, total_steps: int = 0) -> float:
    """Return the learning rate of optimizer step `step`, from 0: linear warm-up, then constant, or decay to 0 at `total_steps`."""
    if schedule not in LR_SCHEDULES:
        raise ValueError(f"unknown learning-rate schedule {schedule!r}: choose one of {', '.join(LR_SCHEDULES)}")
    if step < warmup_steps:
        return lr * (step + 1) / warmup_steps
    if schedule == "constant":
        return lr
    if total_steps <= warmup_steps:
        raise ValueError(f"the {schedule} learning-rate schedule needs total_steps above warmup_steps = {warmup_steps}, not {total_steps}")
    done = min(1.0, (step - warmup_steps) / (total_steps - warmup_steps))
    return lr * (1.0 - done) if schedule == "linear" else lr * 0.5 * (1.0 + math.cos(math.pi * done))


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendSettings:
    """Model, arithmetic and optimizer of a trainer."""

    model_path: str
    """Directory of a Hugging Face causal language model: the policy's version 0."""
    lr: float
    dtype: str = "float32"
    """Dtype of the model and of published weights; with bfloat16 the optimizer has float32 masters and gradient sums."""
    float32_head: bool = False
    """Compute logits in float32 where the model is bfloat16."""
    device: str = "auto"
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    """Weight decay of AdamW (arXiv 1711.05101), on matrices only."""
    lr_schedule: str = "constant"
    warmup_steps: int = 0
    total_steps: int = 0
    """Step at which linear and cosine schedules reach zero."""
    max_grad_norm: float = 1.0
    """Gradients are clipped to this norm; 0 disables clipping."""
    threads: int = 1
    """CPU threads; another number changes the last bits."""
    deterministic: str = "warn"
    """"strict" rejects operations without a deterministic form, "warn" only warns and uses non-deterministic GPU attention."""
    tf32: bool = False
    """True if a GPU computes float32 products with 10 bits of mantissa."""
    seed: int = 0
    gradient_checkpointing: bool = False
    offload_activations: bool = False
    """Keep activations in host memory until the backward pass."""
    compile: bool = False
    """Compile the model's layers, with gradient checkpointing their norms and MLPs: fewer kernels, other last bits, a slower start."""
    share_prompts: str = "auto"
    """Compute common prefixes of rows once: if the logprobs stay equal (`auto`), always or fail (`on`), or never (`off`)."""
    lora_rank: int = 0
    """Train low-rank adapters of this rank instead of the weights; 0 trains the weights."""
    lora_alpha: float | None = None
    """Adapters are scaled by alpha / rank; twice the rank if absent."""
    reference: bool = False
    """Keep a frozen copy of version 0, for the KL term."""
    reference_path: str | None = None
    """Directory of a reference model instead of version 0."""
    snapshot: bool = False
    """Keep a second frozen copy, for the proximal policy; it is version 0 until `take_snapshot`."""
    entropy: bool = False
    """Report `entropy_sum` with every backward pass."""
    entropy_bonus: bool = False
    """Pass the entropies to the loss, with their gradient."""
    value_lr: float | None = None
    """Learning rate of a value head on the hidden states, whose values are passed to the loss; no head if absent."""
    peak_tflops: float | None = None
    """Peak TFLOP/s of the device; from `PEAK_TFLOPS` by its name if absent."""
    share_weights: bool = False
    """Copy the weights into memory that other processes of this user can map."""

    def __post_init__(self) -> None:
        """Raise `ValueError` for values that no backend supports."""
        if self.dtype not in DTYPES:
            raise ValueError(f"unknown trainer dtype {self.dtype!r}: choose one of {', '.join(DTYPES)}")
        if self.share_prompts not in SHARE:
            raise ValueError(f"unknown share_prompts {self.share_prompts!r}: choose one of {', '.join(SHARE)}")
        if self.threads < 1:
            raise ValueError(f"a trainer needs at least one thread, not {self.threads}")
        if not self.lr > 0:
            raise ValueError(f"the learning rate must be above 0, not {self.lr}")
        if self.max_grad_norm < 0:
            raise ValueError(f"max_grad_norm must not be negative: {self.max_grad_norm}")
        for path in (self.model_path, self.reference_path):
            if path is not None and not (Path(path) / "config.json").is_file():
                raise ValueError(f"no model in {path!r}: expected a directory with config.json, a tokenizer and weights")
        self.learning_rate(0)

    @property
    def alpha(self) -> float:
        return 2.0 * self.lora_rank if self.lora_alpha is None else self.lora_alpha

    def learning_rate(self, step: int) -> float:
        return learning_rate(step, lr=self.lr, schedule=self.lr_schedule, warmup_steps=self.warmup_steps, total_steps=self.total_steps)
