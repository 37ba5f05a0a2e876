"""The table for readers who know TRL: every option of its GRPOConfig is in it, and every key that it names is one of ours."""

import re

from penstock.pipeline.config.run_config import Config
from tests.support.paths import ROOT

TABLE = (ROOT / "docs" / "how-to" / "from-trl.md").read_text(encoding="utf-8")
GRPO_CONFIG_1_16 = """
    beta bf16 cache_implementation cast_lm_head_to_fp32 chat_template_kwargs delta disable_dropout ds3_gather_for_generation
    entropy_coef entropy_coef_delta entropy_coef_max entropy_coef_min entropy_target epsilon epsilon_high generation_batch_size
    generation_kwargs gradient_checkpointing importance_sampling_level learning_rate log_completions log_completions_hub_repo
    log_multimodal log_unique_prompts logging_steps loss_type lr_scheduler_kwargs mask_truncated_completions max_completion_length
    max_tool_calling_iterations min_p model_init_kwargs multi_objective_aggregation num_completions_to_print num_generations
    num_generations_eval num_iterations off_policy_mask_threshold pad_to_multiple_of ref_model_mixup_alpha ref_model_sync_steps
    remove_unused_columns repetition_penalty reward_weights router_aux_loss_coef sapo_temperature_neg sapo_temperature_pos
    scale_rewards shuffle_dataset steps_per_generation sync_ref_model temperature top_entropy_quantile top_k top_p
    torch_empty_cache_steps transformers_continuous_batching_config trust_remote_code use_adaptive_entropy use_bias_correction_kl
    use_liger_kernel use_transformers_continuous_batching use_transformers_paged use_vllm vespo_k_neg vespo_k_pos vespo_lambda_neg
    vespo_lambda_pos vllm_enable_sleep_mode vllm_gpu_memory_utilization vllm_group_port vllm_importance_sampling_cap
    vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min vllm_importance_sampling_correction
    vllm_importance_sampling_mode vllm_max_model_length vllm_mode vllm_model_impl vllm_server_base_url vllm_server_host
    vllm_server_port vllm_server_timeout vllm_structured_outputs_regex vllm_tensor_parallel_size
"""
"""The fields that GRPOConfig of TRL 1.16 adds to transformers' TrainingArguments, or gives another default."""


def test_every_option_of_grpo_config_stands_in_the_table() -> None:
    named = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]*)`", TABLE))))
    assert [option for option in GRPO_CONFIG_1_16.split() if option not in named] == []


def test_every_key_that_the_table_names_is_one_of_the_configuration() -> None:
    sections = Config.model_fields
    keys = {(section, key) for section, key in re.findall(r"`(\w+)\.(\w+)[`= ]", TABLE) if section in sections}
    assert len(keys) > 30
    assert [(section, key) for section, key in sorted(keys) if key not in sections[section].annotation.model_fields] == []  # type: ignore[union-attr]
