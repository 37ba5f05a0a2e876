"""Sections of a configuration file: keys, types, bounds and defaults. Checks across sections are in `validate.py`."""

from typing import Annotated, Any, Literal

from pydantic import Field

from penstock.infra.backends.registry import BACKENDS
from penstock.infra.engines.registry import ENGINES
from penstock.infra.sandbox.spawn import REWARD_TOKEN, ChildRules, Isolation
from penstock.pipeline.algorithms.registry import ADVANTAGES, CORRECTIONS, LOSSES
from penstock.pipeline.config.fields import (
    ENVIRONMENT,
    JSON_FILE,
    PATH,
    SOURCE,
    FinitePositive,
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    Resolve,
    Section,
    absolute_model,
    absolute_template,
    one_of,
)
from penstock.pipeline.scheduling.rules import MODES


class RunSection(Section):
    name: str = Field("run", description="first part of the run id")
    steps: Positive | None = Field(None, description="number of optimizer steps; set either `steps` or `epochs`")
    epochs: PositiveFloat | None = Field(None, description="passes through the data; an incomplete last step is skipped")
    seed: NonNegative = Field(0, description="random seed of the prompt order, sampling, generated data and training")
    restart: Literal["on-failure", "never"] = Field("on-failure", description="restart a crashed worker (`penstock run`), or never")
    max_restarts: NonNegative = Field(5, description="consecutive restarts of one worker before the run fails")
    health_port: Annotated[int, Field(ge=0, lt=2**16)] = Field(
        0, description="loopback port of the first worker's `/livez`, `/readyz`, `/metrics`; other workers use the next ports; 0: none"
    )
    stall_s: PositiveFloat = Field(300.0, description="seconds without progress after which the cause of the stall is reported")


class ModelSection(Section):
    path: Annotated[str, Resolve(absolute_model)] = Field(
        description=("Hugging Face causal language model with its tokenizer: a directory, or `hf:ORG/NAME@REVISION`, recorded by commit")
    )
    float32_head: bool = Field(
        False, description="compute logits in float32 in trainer and engine if the model is bfloat16, so that their logprobs differ less"
    )


class SourceSampling(Section):
    temperature: PositiveFloat | None = Field(None, description="sampling temperature; `sampling.temperature` if absent")
    max_new_tokens: Positive | None = Field(None, description="longest completion; `sampling.max_new_tokens` if absent")


class DataSection(Section):
    source: Annotated[str | list[str], SOURCE] = Field(
        description=(
            "`x.jsonl`, `x.parquet` (or a folder, or a pattern), `hf:NAME`, `reasoning-gym:TASK`, `tiny:successor`, "
            "`file.py:function` or `package.module:function`; options follow a question mark: `hf:openai/gsm8k?config=main`; "
            "or a list of sources, which are mixed"
        )
    )
    weights: list[FinitePositive] | None = Field(None, description="share of each source in a mixture; proportional to rows if absent")
    rewards: dict[str, list[str]] = Field(default_factory=dict, description="source -> subset of `reward.functions` that scores its rows")
    sampling: dict[str, SourceSampling] = Field(default_factory=dict, description="source -> `temperature`, `max_new_tokens` for its rows")
    sort_by: str | None = Field(None, description="numeric column by which each epoch is sorted, ascending, instead of shuffled")
    skip_solved: float | None = Field(None, description="mean reward at or above which a row is skipped in the next epoch")
    skip_unsolved: float | None = Field(None, description="mean reward at or below which a row is skipped in the next epoch")
    skip_rows: list[NonNegative] = Field(
        default_factory=list, description="rows (numbered as in the log) that are never used; `penstock fork --without` extends the list"
    )
    prompt_field: str = Field("prompt", description="column of the prompt: text, or a list of chat messages")
    answer_field: str = Field("answer", description="column that reward functions receive as `answer`; empty for none")
    tag_field: str | None = Field(
        None, description="column by whose value a row is assigned to one of `rollout.pools`; `data_source` in a mixture"
    )
    split: str = Field("train", description="split of an `hf:` data set; generated sources reserve other splits for evaluation")
    start: NonNegative = Field(0, description="first row that is used")
    limit: Positive | None = Field(None, description="number of rows that are used; all if absent")
    size: Positive | None = Field(None, description="number of rows that a generated source generates; the source's default if absent")
    shuffle: bool = Field(True, description="shuffle each epoch by the seed")
    first_group: NonNegative = Field(0, description="position of group 0 in the order of prompts; `penstock fork` sets it")
    chat_template: Annotated[str, Resolve(absolute_template)] = Field(
        "auto", description="`auto`: the model's template, if it has one; `on`: required; `off`: none; or the path of a Jinja file"
    )
    system_prompt: str | None = Field(None, description="system message of every prompt that has none; needs a chat template")
    template_arguments: dict[str, Any] = Field(
        default_factory=dict, description="variables of the chat template, such as `enable_thinking = false`"
    )
    max_prompt_tokens: Positive = Field(1024, description="longest prompt; a longer one stops the run with an error that names its row")
    on_change: Literal["refuse", "accept"] = Field("refuse", description="refuse or accept to resume the run if the rows have changed")


class ChildSection(Section):
    """Keys of a section whose code runs in child processes."""

    pass_env: list[Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")]] = Field(
        default_factory=list, description="further environment variables that child processes inherit"
    )
    memory_gb: PositiveFloat | None = Field(
        None, description="memory limit in GB of a child with its descendants; half of the machine's memory if absent"
    )
    max_processes: Positive = Field(512, description="limit on the number of processes of a child with its descendants")
    file_gb: PositiveFloat = Field(64.0, description="size limit of a file that a child writes, in GB")
    isolate: Isolation | None = Field(
        None,
        description=(
            "sandbox: `none`, `landlock`, `bwrap`, or `auto` (`bwrap` if it works, else `landlock`); if absent `landlock`, for root `none`"
        ),
    )
    isolate_network: bool = Field(False, description="run child processes without network; needs `isolate` `bwrap` or `auto`")

    def _rules(self, section: str, *also: str) -> ChildRules:
        return ChildRules(
            section=section, pass_env=(*self.pass_env, *also), memory_gb=self.memory_gb, max_processes=self.max_processes,
            file_gb=self.file_gb, isolate=self.isolate, isolate_network=self.isolate_network,
        )  # fmt: skip


class RewardSection(ChildSection):
    functions: Annotated[list[str], SOURCE] = Field(
        ["exact_match"],
        min_length=1,
        description=(
            "`exact_match`, `math_verify`, `reasoning_gym`, `environment` (the environment's reward), `soft_overlong` (DAPO's"
            " length penalty, arXiv 2503.14476), `reward_table` (a reward by status, arXiv 2509.19128), "
            "`file.py:function`, `package.module:function`, or a service `http://HOST:PORT/PATH`; "
            "options follow a question mark: `soft_overlong?cache=64`"
        ),
    )
    weights: list[float] | None = Field(None, description="one weight per function; 1 each if absent")
    timeout_s: PositiveFloat = Field(30.0, description="time limit in seconds of all reward functions for one completion")
    concurrency: Positive = Field(64, description="groups that a child scores concurrently if a function is `async` or a service")
    on_error: Literal["stop", "drop"] = Field(
        "stop", description="stop the run if a function fails in the same way for more than 5 % of the groups, or drop such groups"
    )

    def rules(self) -> ChildRules:
        """Rules of the reward processes; the token is passed only if a reward is a service."""
        service = [REWARD_TOKEN] if any(name.startswith(("http://", "https://")) for name in self.functions) else []
        return self._rules("reward", *service)


class EnvironmentSection(ChildSection):
    source: Annotated[str | None, ENVIRONMENT] = Field(
        None,
        description=(
            "`file.py:Class`, `package:Class`, `gymnasium:ID`, `textarena:ID`, `openenv:ws://HOST:PORT`, `tiny:lake`, or "
            "`agent:COMMAND`: samples are trajectories of several turns; if absent, single completions"
        ),
    )
    carrier: Literal["process", "log"] = Field(
        "process", description="trajectories run in rollout workers (`process`) or environment workers (`log`)"
    )
    processes: Positive = Field(2, description="child processes for environments, per worker")
    in_flight: Positive = Field(256, description="concurrent trajectories, per worker")
    max_turns: Positive = Field(10, description="largest number of policy turns in a trajectory")
    max_tokens: Positive = Field(4096, description="largest number of tokens of a trajectory with its prompt")
    max_result_tokens: Positive | None = Field(
        None, description="tokens to which each tool result or observation is truncated; no limit if absent"
    )
    history: Literal["exact", "template"] = Field(
        "exact", description="`exact`: contexts contain all generated tokens; `template`: what the chat template renders"
    )
    resume: Literal["replay", "restart"] = Field(
        "replay", description="after a crash: replay the recorded actions, or start the trajectory again"
    )
    reset_timeout_s: PositiveFloat = Field(60.0, description="time limit of a reset in seconds")
    step_timeout_s: PositiveFloat = Field(30.0, description="time limit of a step in seconds")
    trajectory_timeout_s: PositiveFloat = Field(3600.0, description="limit in seconds on the total environment time of a trajectory")
    retries: NonNegative = Field(2, description="retries of a failing environment before its sample is aborted")

    def rules(self) -> ChildRules:
        return self._rules("environment")


class ScheduleSection(Section):
    mode: Annotated[str, one_of(MODES)] = Field("pipelined", description=", ".join(MODES))
    prompts_per_step: Positive = Field(8, description="U: prompt groups per optimizer step")
    samples_per_prompt: Annotated[int, Field(ge=1)] = Field(8, description="K: samples per prompt group, at least 2")
    steps_per_version: Positive = Field(1, description="S: optimizer steps between two published versions")
    max_lag: NonNegative | None = Field(None, description="largest lag of a trained sample, in versions; the mode's default if absent")
    order: Literal["submission", "arrival"] | None = Field(
        None, description="train on groups by number, or in the order of scoring; the mode's default if absent"
    )
    stale_in_hand: Literal["finish", "abort", "continue"] | None = Field(
        None, description="what to do with a group in flight that can no longer be fresh; the mode's default if absent"
    )
    oversample: NonNegative = Field(0, description="r: extra samples of a group; K + r are started, and the first K are used")
    oversample_groups: NonNegative = Field(
        0, description="s: extra groups of a round; U·S + s are started, and the first U·S are trained; only with order `arrival`"
    )
    max_drops_per_step: Positive | None = Field(
        None, description="the run stops if more groups are dropped between two steps; if absent 16 U·S, at least 64"
    )


class SamplingSection(Section):
    temperature: PositiveFloat = Field(1.0, description="sampling temperature, which also divides the learner's logits")
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(1.0, description="nucleus sampling; only with `top_k`")
    top_k: Annotated[int, Field(ge=0, le=128)] = Field(0, description="number of most likely tokens to sample from; 0 for all")
    max_new_tokens: Positive = Field(256, description="longest completion; one that reaches it has `finish = length`")
    stop: list[Annotated[str, Field(min_length=1)]] = Field(
        default_factory=list, description="texts that end a completion, and are part of it"
    )
    seeded: bool = Field(True, description="make each sample reproducible from `run.seed`; vLLM generates faster if false")


class AlgorithmSection(Section):
    defaults: Literal[1, 2] = Field(2, description="version of the default values; a fork keeps its parent's")
    loss: Annotated[str, SOURCE, one_of(LOSSES, or_function=True)] = Field(
        "grpo", description=f"{', '.join(LOSSES)}, or a function `file.py:function`, `package:function`"
    )
    advantage: Annotated[Annotated[str, one_of(ADVANTAGES, or_function=True, options=True)] | None, SOURCE] = Field(
        None, description=f"{', '.join(ADVANTAGES)}, or a function; the loss's default if absent"
    )
    value_lr: FinitePositive | None = Field(
        None,
        description="learning rate of a value head on the policy's hidden states, whose value is subtracted from each token's advantage "
        "(arXiv 2509.19128); no value head if absent",
    )
    aggregate: Literal["token_mean", "sequence_mean", "constant"] | None = Field(
        None, description="how token losses are averaged (`constant`: sum divided by `max_new_tokens`); the loss's default if absent"
    )
    clip_low: FinitePositive | None = Field(None, description="lower clip range of the ratio; if absent 0.2, `gspo` 0.0003, `cispo` 1")
    clip_high: FinitePositive | None = Field(None, description="upper clip range; if absent 0.2, `dapo` 0.28, `gspo` 0.0004, `cispo` 4")
    clip_dual: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = Field(
        None, description="upper bound of the ratio for negative advantages, 0 for none; if absent 3, `cispo` none"
    )
    kl_coef: NonNegativeFloat = Field(
        0.0, description="weight of the KL to the reference model; above 0 the trainer holds a frozen copy of it"
    )
    final_kl_coef: NonNegativeFloat | None = Field(None, description="`kl_coef` at the last step, reached linearly; constant if absent")
    kl_weighted: bool | None = Field(None, description="multiply each token's KL by the ratio current / behaviour policy; true if absent")
    kl_in: Literal["loss", "reward"] = Field("loss", description="KL as k3 in the loss, or as k1 subtracted from the reward")
    reference: Annotated[str | None, PATH] = Field(None, description="directory of the reference model; `model.path` if absent")
    proximal: Literal["behaviour", "snapshot", "current"] | None = Field(
        None,
        description="policy in the ratio's denominator; `snapshot`: at the start of a version, if S > 1; default by schedule, loss, dtype",
    )
    correction: Annotated[str, one_of(CORRECTIONS, or_none=True)] | None = Field(
        None,
        description=f"importance weight proximal / behaviour policy: none, {', '.join(CORRECTIONS)}; default by schedule, loss, dtype",
    )
    correction_low: Annotated[float, Field(ge=0, le=1)] | None = Field(
        None, description="lower limit; smaller importance weights are masked; if absent 0, `icepop` 0.5, `geometric_mis` 0.9"
    )
    correction_high: Annotated[float, Field(ge=1, allow_inf_nan=False)] | None = Field(
        None,
        description="upper limit; larger weights are truncated (`tis`) or masked; if absent 5, `geometric_tis` 2, `geometric_mis` 1.1",
    )
    reject_kl: FinitePositive | None = Field(
        None, description="mean KL between behaviour and proximal policy above which a sequence is masked"
    )
    entropy_coef: NonNegativeFloat = Field(0.0, description="weight of a bonus for each token's entropy")
    final_entropy_coef: NonNegativeFloat | None = Field(
        None, description="`entropy_coef` at the last step, reached linearly; constant if absent"
    )
    entropy_floor: FinitePositive | None = Field(None, description="entropy in nats above which a token gets no bonus; no limit if absent")
    ess_floor: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None, description="if a step's effective sample size is lower, no prompt is admitted ahead of its round; no limit if absent"
    )
    combine: Literal["rewards", "advantages"] = Field(
        "rewards", description="`rewards`: advantages of the summed rewards; `advantages`: sum of each function's (GDPO, arXiv 2601.05242)"
    )
    filter_zero_variance: bool = Field(True, description="groups with equal rewards are `filtered` and replaced")
    truncated: Literal["train", "mask", "penalise"] = Field(
        "train", description="`mask` excludes truncated samples from the loss, `penalise` changes their reward"
    )
    truncated_penalty: float = Field(-1.0, description='added to the reward of truncated samples if `truncated = "penalise"`')


class PoolSection(Section):
    workers: Positive = Field(1, description="rollout workers that `penstock run` starts in the pool")
    tags: list[str] = Field(default_factory=list, description="values of `data.tag_field` that the pool samples; if empty, all others")
    fallback: list[str] = Field(default_factory=list, description="pools that generate this pool's samples while it has no worker")


class RolloutSection(Section):
    engine: Annotated[str, one_of(ENGINES)] = Field("transformers", description=f"{', '.join(ENGINES)} (random tokens, no model)")
    workers: Positive = Field(2, description="rollout workers that `penstock run` starts")
    gpus_per_worker: NonNegative = Field(
        0, description="GPUs of each worker, assigned after the trainer's; if this and `trainer.gpus` are 0, each worker sees all GPUs"
    )
    threads: Positive = Field(1, description="threads of each worker")
    device: str = Field("auto", description="`auto`: a GPU if torch sees one, else `cpu`")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="number format of the weights")
    slots: Positive | None = Field(None, description="groups in flight per worker; if absent 3, with vLLM as many as `concurrency` allows")
    concurrency: Positive = Field(64, description="concurrent samples in vLLM (its `max_num_seqs`)")
    kv_cache: Literal["recompute", "keep"] = Field(
        "recompute", description="after loading new weights, recompute or keep the KV cache of samples in flight"
    )
    engine_process: bool = Field(False, description="run vLLM in a separate process")
    vllm: dict[str, Any] = Field(default_factory=dict, description="further arguments of vLLM's engine, such as `tensor_parallel_size`")
    toy_delay_s: NonNegativeFloat = Field(0.0, description="seconds that the toy engine sleeps per token of a group")
    pools: dict[str, PoolSection] = Field(default_factory=dict, description="groups of rollout workers by name")


class ScorerSection(Section):
    workers: Positive = Field(1, description="scorers that `penstock run` starts")
    processes: Positive = Field(1, description="child processes that run the reward functions, per scorer")
    group_deadline_s: PositiveFloat = Field(
        3600.0, description="a group is `abandoned` after this many seconds in which its rollout worker was active"
    )


class TrainerSection(Section):
    backend: Annotated[str, one_of(BACKENDS)] = Field("torch", description="`torch` or `deepspeed`")
    zero_stage: Literal[0, 1, 2, 3] = Field(1, description="ZeRO stage of DeepSpeed")
    deepspeed_config: Annotated[dict[str, Any], JSON_FILE] = Field(
        default_factory=dict, description="DeepSpeed's own options: a table, or the path of their JSON file"
    )
    offload: Literal["none", "optimizer", "parameters"] = Field(
        "none", description="`optimizer`: keep master weights and Adam moments in host memory; `parameters`: the weights too"
    )
    offload_activations: bool = Field(False, description="keep activations for the backward pass in host memory")
    processes: Positive = Field(1, description="data-parallel processes, each with its own threads or GPU")
    device: str = Field("auto", description="`auto`: a GPU if torch sees one, else `cpu`")
    gpus: NonNegative = Field(
        0, description="GPUs of the trainer, as many as `processes`; if this and `rollout.gpus_per_worker` are 0, each worker sees all GPUs"
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="number format of the weights; optimizer state is float32. `auto` in a file: bfloat16 if the device supports it",
    )
    threads: Positive = Field(
        1,
        description="threads per process, which affect rounding; if absent by the model's size, with `offload` all cores",
    )
    deterministic: Literal["warn", "strict"] = Field("warn", description="`strict` raises an error for nondeterministic operations")
    tf32: bool = Field(False, description="compute float32 matrix products on a GPU in TF32; if absent, true on a GPU")
    on_mismatch: Literal["stop", "rebase"] | None = Field(
        None,
        description="if a recomputed step differs: stop, or record both and continue; if absent `rebase` on a GPU or on changed hardware",
    )
    peak_tflops: FinitePositive | None = Field(None, description="peak TFLOPS of the device, for `mfu`; known for common GPUs")
    lr: PositiveFloat = Field(1e-6, description="peak learning rate of AdamW")
    betas: tuple[float, float] = Field((0.9, 0.95), description="betas of AdamW")
    weight_decay: NonNegativeFloat = Field(0.0, description="weight decay of AdamW")
    lr_schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="decay of the learning rate to 0 at the last step")
    warmup_steps: NonNegative = Field(0, description="steps of linear warm-up")
    max_grad_norm: PositiveFloat = Field(1.0, description="gradient norm above which gradients are clipped")
    lora_rank: NonNegative = Field(0, description="rank of LoRA adapters, which are trained instead of the weights; 0 trains the weights")
    lora_alpha: FinitePositive | None = Field(None, description="scale of the LoRA adapters is alpha / rank; 2 x `lora_rank` if absent")
    micro_batch_tokens: Positive = Field(8192, description="tokens of one micro-batch, per process")
    micro_batch_by: Literal["padded", "computed"] = Field(
        "padded",
        description="what `micro_batch_tokens` counts: `padded`: rows times longest row; `computed`: tokens that the model computes, if it "
        "computes common prefixes once; processes then get micro-batches of equal size",
    )
    gradient_checkpointing: bool = Field(False, description="recompute activations: less memory, more time")
    compile: bool = Field(
        False, description="use torch.compile on layers (with gradient checkpointing on norms and MLPs); if absent, true on a GPU"
    )
    share_prompts: Literal["auto", "on", "off"] = Field(
        "auto", description="compute common prompt prefixes once; `auto`: if the logprobs are the same, `on`: fail if they are not"
    )
    export: bool = Field(True, description="write a Hugging Face directory with each checkpoint, and at the end `runs/RUN/model`")
    checkpoint_every: NonNegative = Field(50, description="optimizer steps between two checkpoints; 0 for none")
    checkpoint_keep_last: Positive = Field(2, description="newest checkpoints that are retained, in addition to the best one")
    checkpoint_keep_every: Positive | None = Field(None, description="also retain every checkpoint whose step is a multiple of this")
    initial_state: Annotated[str | None, PATH] = Field(
        None, description="directory of the initial optimizer state; `penstock fork` sets it"
    )
    initial_steps: NonNegative = Field(0, description="optimizer steps before `initial_state`; warm-up and decay continue after them")
    checkpoint_dir: Annotated[str | None, PATH] = Field(
        None, description="parent directory of checkpoints; `runs/RUN/checkpoints` if absent"
    )


class EvalSection(Section):
    source: Annotated[str | list[str] | None, SOURCE] = Field(
        None, description="held-out prompts, as `data.source`; no evaluation if absent"
    )
    engine: Literal["own", "rollout"] = Field(
        "own", description="`own`: the evaluator runs its own engine; `rollout`: a rollout worker evaluates, the default on a GPU"
    )
    functions: Annotated[list[str] | None, SOURCE] = Field(None, description="reward functions of evaluation; `reward.functions` if absent")
    weights: list[float] | None = Field(None, description="one weight per function; 1 each if absent")
    threshold: float | None = Field(
        None, description="reward from which a completion counts as solved; the sum of positive weights if absent"
    )
    split: str = Field("test", description="as `data.split`")
    start: NonNegative = Field(0, description="as `data.start`")
    limit: Positive | None = Field(64, description="as `data.limit`, for each source")
    size: Positive | None = Field(None, description="as `data.size`")
    every: Positive = Field(50, description="versions between two evaluations; the first and the last are always evaluated")
    samples: Positive = Field(4, description="sampled completions per prompt, in addition to the greedy one")
    temperature: PositiveFloat = Field(1.0, description="temperature of the sampled completions")
    max_new_tokens: Positive | None = Field(None, description="longest completion of the evaluation; `sampling.max_new_tokens` if absent")
    target: float | None = Field(None, description="greedy accuracy at which the run ends")
    patience: Positive | None = Field(None, description="the run ends after this many evaluations without a new best accuracy")
