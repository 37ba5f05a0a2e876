"""Settings of every trainer backend, checked before anything heavy is imported."""

from dataclasses import dataclass
from pathlib import Path

from penstock.infra.backends.schedule import learning_rate

DTYPES = ("float32", "bfloat16")
SHARE = ("auto", "on", "off")


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendSettings:
    """Model, arithmetic and optimizer of a trainer; `ValueError` names an invalid value."""

    model_path: str
    """Directory of a Hugging Face causal language model: the policy's version 0."""
    lr: float
    dtype: str = "float32"
    """Type of the weights in use and published; with bfloat16 the optimizer keeps float32 masters and gradient sums."""
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
    """Gradients are scaled down to this norm; 0 switches clipping off."""
    threads: int = 1
    """CPU threads for the arithmetic; another number changes the last bits."""
    deterministic: str = "warn"
    """"strict" refuses operations without a deterministic form, "warn" only warns, and leaves GPU attention without one."""
    tf32: bool = False
    """Whether a GPU computes float32 products with 10 bits of mantissa."""
    seed: int = 0
    gradient_checkpointing: bool = False
    offload_activations: bool = False
    """Keep what the backward pass needs in the host's memory until then."""
    share_prompts: str = "auto"
    """Whether rows compute their common beginnings once: where that holds (`auto`), or not without it (`on`), or not."""
    lora_rank: int = 0
    """Train low-rank adapters of this rank instead of the weights; 0 trains the weights."""
    lora_alpha: float | None = None
    """Adapters count alpha / rank; twice the rank if absent."""
    reference: bool = False
    """Keep a frozen copy of version 0, for the KL term."""
    reference_path: str | None = None
    """Directory of the model to keep as the reference instead of version 0."""
    snapshot: bool = False
    """Keep a second frozen copy, for the proximal policy; it is version 0 until `take_snapshot`."""
    entropy: bool = False
    """Report `entropy_sum` with every backward pass."""
    entropy_bonus: bool = False
    """Give the entropies to the loss, with their gradient."""
    peak_tflops: float | None = None
    """What the device computes at most, in 10^12 operations a second; from `PEAK_TFLOPS` by its name if absent."""

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
                raise ValueError(f"no model in {path!r}: it needs a directory with config.json, tokenizer and weights")
        self.learning_rate(0)

    @property
    def wants_entropy(self) -> bool:
        """Whether entropies are computed."""
        return self.entropy or self.entropy_bonus

    @property
    def alpha(self) -> float:
        """LoRA's alpha."""
        return 2.0 * self.lora_rank if self.lora_alpha is None else self.lora_alpha

    def learning_rate(self, step: int) -> float:
        """The learning rate of optimizer step `step`."""
        return learning_rate(step, lr=self.lr, schedule=self.lr_schedule, warmup_steps=self.warmup_steps, total_steps=self.total_steps)
