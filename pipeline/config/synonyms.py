"""Keys and values of other trainers (TRL, verl, prime-rl, OpenRLHF) and our equivalents.

Only exact equivalents are listed; `None` means that there is none, so that no similar key is suggested.
"""

from collections.abc import Mapping

KEYS: Mapping[str, str | None] = {
    "learning_rate": "trainer.lr",
    "lr_scheduler_type": "trainer.lr_schedule",
    "beta": "algorithm.kl_coef",
    "kl_beta": "algorithm.kl_coef",
    "epsilon": "algorithm.clip_low",
    "epsilon_high": "algorithm.clip_high",
    "delta": "algorithm.clip_dual",
    "loss_type": "algorithm.loss",
    "num_generations": "schedule.samples_per_prompt",
    "rollouts_per_example": "schedule.samples_per_prompt",
    "group_size": "schedule.samples_per_prompt",
    "train_batch_size": "schedule.prompts_per_step",
    "batch_size": "schedule.prompts_per_step",
    "max_async_level": "schedule.max_lag",
    "max_completion_length": "sampling.max_new_tokens",
    "max_response_length": "sampling.max_new_tokens",
    "max_tokens": "sampling.max_new_tokens",
    "max_prompt_length": "data.max_prompt_tokens",
    "dataset": "data.source",
    "dataset_name": "data.source",
    "train_files": "data.source",
    "reward_funcs": "reward.functions",
    "reward_weights": "reward.weights",
    "model.name": "model.path",
    "model_name": "model.path",
    "model_name_or_path": "model.path",
    "max_steps": "run.steps",
    "num_train_epochs": "run.epochs",
    "save_steps": "trainer.checkpoint_every",
    "eval_steps": "eval.every",
    "per_device_train_batch_size": "trainer.micro_batch_tokens",
    "bf16": "trainer.dtype",
    "deepspeed": "trainer.deepspeed_config",
    "activation_offloading": "trainer.offload_activations",
    "use_vllm": "rollout.engine",
    "gpu_memory_utilization": "rollout.vllm.gpu_memory_utilization",
    "num_workers": "rollout.workers",
    "use_peft": "trainer.lora_rank",
    "use_lora": "trainer.lora_rank",
    "lora_r": "trainer.lora_rank",
    "tensor_parallel": "rollout.vllm.tensor_parallel_size",
    "tensor_parallel_size": "rollout.vllm.tensor_parallel_size",
    "report_to": "wandb.enabled",
    "wandb": "wandb.enabled",
    "tensorboard": "tensorboard.enabled",
    "push_to_hub": None,
}
"""Key of another trainer, or its last part -> our key."""

VALUES: Mapping[str, str] = {
    "async": "in_flight",
    "asynchronous": "in_flight",
    "sync": "synchronous",
    "on_policy": "synchronous",
    "ppo": "grpo",
    "bnpo": "dapo",
    "hf": "transformers",
    "huggingface": "transformers",
}
