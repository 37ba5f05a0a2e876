"""Sections of a configuration file: keys, types, bounds and defaults. Checks across sections are in `validate.py`."""

from typing import Annotated, Any, Literal

from pydantic import Field

from penstock.infra.backends.registry import BACKENDS
from penstock.infra.engines.registry import ENGINES
from penstock.infra.sandbox.rules import REWARD_TOKEN, ChildRules, Isolation
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
from penstock.pipeline.scheduling.schedule import MODES


class RunSection(Section):
    name: str = Field("run", description="first part of the run id")
    steps: Positive | None = Field(None, description="optimizer steps; or give epochs")
    epochs: PositiveFloat | None = Field(None, description="passes over the data instead of steps")
    seed: NonNegative = 0
    restart: Literal["on-failure", "never"] = Field("on-failure", description="on-failure: `penstock run` restarts a crashed worker")
    max_restarts: NonNegative = Field(5, description="consecutive restarts of one worker before the run fails")
    health_port: Annotated[int, Field(ge=0, lt=2**16)] = Field(
        0, description="port of the first worker's /livez, /readyz and /metrics, the next ones follow; 0 for none"
    )
    stall_s: PositiveFloat = Field(300.0, description="seconds without progress after which the stuck worker is reported")


class ModelSection(Section):
    path: Annotated[str, Resolve(absolute_model)] = Field(
        description="a Hugging Face causal language model: a directory, or hf:ORG/NAME@REVISION of the hub, which a run records by commit"
    )


class SourceSampling(Section):
    temperature: PositiveFloat | None = None
    max_new_tokens: Positive | None = None


class DataSection(Section):
    source: Annotated[str | list[str], SOURCE] = Field(
        description="file.jsonl, file.parquet, hf:NAME, reasoning-gym:TASK, file.py:function, tiny:successor; or a list of such"
    )
    weights: list[FinitePositive] | None = Field(None, description="weight of each source; its number of rows if absent")
    rewards: dict[str, list[str]] = Field(default_factory=dict, description="source -> those of reward.functions that score it; else all")
    sampling: dict[str, SourceSampling] = Field(default_factory=dict, description="source -> its own sampling settings")
    sort_by: str | None = Field(None, description="column of numbers by which each epoch is sorted, ascending, instead of shuffled")
    skip_solved: float | None = Field(None, description="mean reward at or above which a row is skipped in the next epoch")
    skip_unsolved: float | None = Field(None, description="mean reward at or below which a row is skipped in the next epoch")
    prompt_field: str = "prompt"
    answer_field: str = "answer"
    tag_field: str | None = Field(None, description="column with the tag that selects one of rollout.pools for a prompt")
    split: str = "train"
    start: NonNegative = Field(0, description="first row of the slice that is used")
    limit: Positive | None = Field(None, description="rows of the slice that is used")
    size: Positive | None = Field(None, description="rows to make, for sources that generate them")
    shuffle: bool = True
    first_group: NonNegative = Field(0, description="index of group 0 in the order of prompts")
    chat_template: Annotated[str, Resolve(absolute_template)] = Field("auto", description="auto, on, off, or the path of a Jinja file")
    system_prompt: str | None = Field(None, description="first message of every prompt that has no system message; none if absent")
    template_arguments: dict[str, Any] = Field(
        default_factory=dict, description="variables of the chat template in addition to the messages: enable_thinking, …"
    )
    max_prompt_tokens: Positive = 1024
    on_change: Literal["refuse", "accept"] = Field("refuse", description="what a resumed run does if its rows have changed since its start")


class ChildSection(Section):
    """Keys of a section whose code runs in child processes."""

    pass_env: list[Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")]] = Field(
        default_factory=list, description="environment variables that its processes get in addition to the standard list"
    )
    memory_gb: PositiveFloat | None = Field(
        None, description="memory of a child process and its descendants; half of the machine's if absent"
    )
    max_processes: Positive = Field(512, description="processes of a child and its descendants")
    file_gb: PositiveFloat = Field(64.0, description="size of a file that a child process writes")
    isolate: Isolation | None = Field(
        None, description="none, landlock, bwrap, or auto: bwrap if it works, else landlock; for root none, else landlock"
    )
    isolate_network: bool = Field(False, description="its processes have no network; needs isolate = bwrap or auto")

    def _rules(self, section: str, *also: str) -> ChildRules:
        return ChildRules(
            section=section,
            pass_env=(*self.pass_env, *also),
            memory_gb=self.memory_gb,
            max_processes=self.max_processes,
            file_gb=self.file_gb,
            isolate=self.isolate,
            isolate_network=self.isolate_network,
        )


class RewardSection(ChildSection):
    functions: Annotated[list[str], SOURCE] = Field(["exact_match"], min_length=1)
    weights: list[float] | None = None
    timeout_s: PositiveFloat = 30.0
    concurrency: Positive = Field(64, description="groups that a child process scores concurrently if a function is async or a service")
    on_error: Literal["stop", "drop"] = Field(
        "stop", description="stop: a reward that fails in the same way for more than 5 % of the groups stops the run"
    )

    def rules(self) -> ChildRules:
        """Rules of the reward processes; the token is passed only if a reward is a service."""
        service = [REWARD_TOKEN] if any(name.startswith(("http://", "https://")) for name in self.functions) else []
        return self._rules("reward", *service)


class EnvironmentSection(ChildSection):
    source: Annotated[str | None, ENVIRONMENT] = Field(
        None,
        description="file.py:Class, gymnasium:ID, textarena:ID, openenv:ADDRESS, tiny:lake or agent:COMMAND; samples are then trajectories",
    )
    carrier: Literal["process", "log"] = Field("process", description="trajectories run in rollout workers, or in environment workers")
    processes: Positive = Field(2, description="child processes for environments, per worker that runs them")
    in_flight: Positive = Field(256, description="trajectories at a time, per worker that runs them")
    max_turns: Positive = Field(10, description="turns of the policy, after which a trajectory is truncated")
    max_tokens: Positive = Field(4096, description="tokens of a trajectory with its prompt, after which it is truncated")
    max_result_tokens: Positive | None = Field(None, description="tokens to which a tool result or a step's text is cut; not cut if absent")
    history: Literal["exact", "template"] = Field(
        "exact", description="exact: contexts contain all generated tokens; template: contexts are rendered by the chat template"
    )
    resume: Literal["replay", "restart"] = Field(
        "replay", description="after a lost session: replay the recorded actions on the same seed, or restart the trajectory"
    )
    reset_timeout_s: PositiveFloat = 60.0
    step_timeout_s: PositiveFloat = 30.0
    trajectory_timeout_s: PositiveFloat = Field(3600.0, description="environment time of one trajectory")
    retries: NonNegative = Field(2, description="retries of a failing environment before its sample is aborted")

    def rules(self) -> ChildRules:
        """Rules of the processes of environments and agents."""
        return self._rules("environment")


class ScheduleSection(Section):
    mode: Annotated[str, one_of(MODES)] = "pipelined"
    prompts_per_step: Positive = Field(8, description="U: prompt groups per optimizer step")
    samples_per_prompt: Annotated[int, Field(ge=1)] = Field(8, description="K: samples per prompt group")
    steps_per_version: Positive = Field(1, description="S: optimizer steps between two published weights")
    max_lag: NonNegative | None = Field(None, description="versions a trained sample may be behind; the mode's own value if absent")
    order: Literal["submission", "arrival"] | None = Field(None, description="the mode's own if absent")
    stale_in_hand: Literal["finish", "abort", "continue"] | None = Field(
        None, description="what to do with a group in flight that can no longer be fresh; the mode's own if absent"
    )
    oversample: NonNegative = Field(0, description="r: samples started beyond K per group; the group is closed when K of them have ended")
    max_drops_per_step: Positive | None = Field(
        None, description="dropped groups between two steps that stop the run; 16 U·S, at least 64, if absent"
    )


class SamplingSection(Section):
    temperature: PositiveFloat = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(1.0, description="with top_k only, as each token's support is recorded")
    top_k: Annotated[int, Field(ge=0, le=128)] = Field(0, description="number of most likely tokens to sample from; 0 for all")
    max_new_tokens: Positive = 256
    stop: list[Annotated[str, Field(min_length=1)]] = Field(
        default_factory=list, description="texts that end a completion, as the model's end token does"
    )
    seeded: bool = Field(True, description="each sample has a random seed of its own; vLLM generates faster without")


class AlgorithmSection(Section):
    defaults: Literal[1, 2] = Field(2, description="edition of the defaults; 1 in records without this key")
    loss: Annotated[str, SOURCE, one_of(LOSSES, or_function=True)] = Field(
        "grpo", description=f"{', '.join(LOSSES)}, or package:function / file.py:function"
    )
    advantage: Annotated[Annotated[str, one_of(ADVANTAGES, or_function=True, options=True)] | None, SOURCE] = Field(
        None, description=f"{', '.join(ADVANTAGES)}, or package:function / file.py:function; the loss's own choice if absent"
    )
    aggregate: Literal["token_mean", "sequence_mean", "constant"] | None = None
    clip_low: FinitePositive | None = Field(None, description="the loss's own choice if absent")
    clip_high: FinitePositive | None = Field(None, description="the loss's own choice if absent")
    clip_dual: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = Field(
        None, description="bound of the ratio for negative advantages, 0 for none; the loss's own choice if absent"
    )
    kl_coef: NonNegativeFloat = 0.0
    kl_weighted: bool | None = Field(
        None, description="weight the KL of a token by current / behaviour, because the latter sampled it; true if absent"
    )
    kl_in: Literal["loss", "reward"] = Field("loss", description="k3 in the loss, or k1 off the reward before advantages are taken")
    reference: Annotated[str | None, PATH] = Field(
        None, description="directory of the model that kl_coef compares with; model.path if absent"
    )
    proximal: Literal["behaviour", "snapshot", "current"] | None = Field(
        None, description="denominator of the ratio; from the schedule, the loss and the correction if absent"
    )
    correction: Annotated[str, one_of(CORRECTIONS, or_none=True)] | None = Field(
        None, description="correction that bounds the weight proximal / behaviour; from the schedule and the proximal policy if absent"
    )
    correction_low: Annotated[float, Field(ge=0, le=1)] | None = Field(None, description="the correction's own bound if absent")
    correction_high: Annotated[float, Field(ge=1, allow_inf_nan=False)] | None = Field(
        None, description="the correction's own bound if absent"
    )
    reject_kl: FinitePositive | None = Field(
        None, description="sequences over which the mean KL of behaviour and proximal policy is above it are not trained; none if absent"
    )
    entropy_coef: NonNegativeFloat = Field(0.0, description="of a bonus for the entropy of each token's distribution")
    entropy_floor: FinitePositive | None = Field(
        None, description="nats from which a token's entropy has no more bonus; none if absent, and the bonus never ends"
    )
    ess_floor: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None, description="effective sample size of a step below which no prompt is admitted ahead of its round; none if absent"
    )
    combine: Literal["rewards", "advantages"] = Field(
        "rewards", description="sum the rewards of several functions, or the advantages of each"
    )
    filter_zero_variance: bool = True
    truncated: Literal["train", "mask", "penalise"] = "train"
    truncated_penalty: float = Field(-1.0, description='added to the reward of a truncated completion if truncated = "penalise"')


class PoolSection(Section):
    workers: Positive = 1
    tags: list[str] = Field(default_factory=list, description="values of data.tag_field whose prompts it gets; without any, all others")
    fallback: list[str] = Field(
        default_factory=list, description="pools that take its prompts while it has no workers: the first that has some; else they wait"
    )


class RolloutSection(Section):
    engine: Annotated[str, one_of(ENGINES)] = "transformers"
    workers: Positive = 2
    gpus_per_worker: NonNegative = Field(0, description="GPUs of each rollout worker, after the trainer's; 0 with trainer.gpus = 0: all")
    threads: Positive = 1
    device: str = "auto"
    dtype: Literal["float32", "bfloat16"] = "float32"
    slots: Positive | None = Field(
        None, description="maximum number of groups in flight per worker; from the engine's concurrency if absent"
    )
    concurrency: Positive = Field(64, description="concurrent samples in vLLM (its max_num_seqs)")
    kv_cache: Literal["recompute", "keep"] = Field(
        "recompute", description="recompute or keep the KV cache of samples in flight when the weights change"
    )
    engine_process: bool = Field(False, description="vLLM in a process of its own instead of the worker's")
    vllm: dict[str, Any] = Field(default_factory=dict, description="any argument of vLLM's engine: tensor_parallel_size, …")
    toy_delay_s: NonNegativeFloat = Field(0.0, description="seconds the toy engine sleeps for each token of a group")
    pools: dict[str, PoolSection] = Field(
        default_factory=dict, description="groups of rollout workers by name, each with prompts of its own by their tag"
    )


class ScorerSection(Section):
    workers: Positive = 1
    processes: Positive = Field(1, description="child processes that run the reward functions, per scorer")
    group_deadline_s: PositiveFloat = Field(
        3600.0, description="seconds of its rollout worker's activity after which an unfinished group is abandoned"
    )


class TrainerSection(Section):
    backend: Annotated[str, one_of(BACKENDS)] = "torch"
    zero_stage: Literal[0, 1, 2, 3] = 1
    deepspeed_config: Annotated[dict[str, Any], JSON_FILE] = Field(
        default_factory=dict, description="DeepSpeed's own options, as a table or the path of its JSON file, which is read at once"
    )
    offload: Literal["none", "optimizer", "parameters"] = Field(
        "none", description="kept in host memory under deepspeed: optimizer (masters and moments), or parameters, too"
    )
    offload_activations: bool = Field(False, description="store activations for the backward pass in host memory")
    processes: Positive = Field(1, description="data-parallel processes of the trainer, each with threads or a GPU of its own")
    device: str = "auto"
    gpus: NonNegative = Field(0, description="GPUs of the trainer, the first there are; 0 with rollout.gpus_per_worker = 0: all")
    dtype: Literal["float32", "bfloat16"] = "float32"
    threads: Positive = 1
    deterministic: Literal["warn", "strict"] = Field(
        "warn", description="strict refuses operations without a deterministic form; GPU attention is deterministic only under it"
    )
    tf32: bool = Field(False, description="whether a GPU computes float32 products in TF32; on GPUs if absent")
    on_mismatch: Literal["stop", "rebase"] | None = Field(
        None, description="what a restarted trainer does if a repeated step gives other bits; rebase on GPUs and elsewhere if absent"
    )
    peak_tflops: FinitePositive | None = Field(None, description="peak TFLOPS of the device, for `mfu`; built in for common GPUs")
    lr: PositiveFloat = 1e-6
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: NonNegativeFloat = 0.0
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: NonNegative = 0
    max_grad_norm: PositiveFloat = 1.0
    lora_rank: NonNegative = Field(0, description="rank of the adapters that are trained instead of the weights; 0 trains the weights")
    lora_alpha: FinitePositive | None = Field(None, description="adapters count alpha / rank; 2 x lora_rank if absent")
    micro_batch_tokens: Positive = Field(8192, description="padded tokens in one micro-batch")
    gradient_checkpointing: bool = False
    share_prompts: Literal["auto", "on", "off"] = Field(
        "auto",
        description="compute the common prefix of a group's samples once: auto if the logprobs are the same, on fails if they differ",
    )
    export: bool = Field(True, description="write the model as a Hugging Face directory, with each checkpoint and at the end")
    checkpoint_every: NonNegative = Field(50, description="optimizer steps between two checkpoints; 0 writes none")
    checkpoint_keep_last: Positive = Field(2, description="newest checkpoints that stay")
    checkpoint_keep_every: Positive | None = Field(None, description="those whose number of steps it divides stay as well")
    initial_state: Annotated[str | None, PATH] = Field(
        None, description="folder of the initial optimizer state, as `penstock fork` writes it; a new state if absent"
    )
    initial_steps: NonNegative = Field(0, description="optimizer steps of that state; the learning-rate schedule continues after them")
    checkpoint_dir: Annotated[str | None, PATH] = Field(
        None, description="holds a folder per run; runs/RUN/checkpoints in the state directory if absent"
    )


class EvalSection(Section):
    source: Annotated[str | list[str] | None, SOURCE] = Field(
        None, description="held-out prompts, as data.source, or a list of such; no evaluator if absent"
    )
    engine: Literal["own", "rollout"] = Field(
        "own", description="own: the evaluator has an engine of its own; rollout: a rollout worker evaluates on its engine between groups"
    )
    functions: Annotated[list[str] | None, SOURCE] = Field(None, description="as reward.functions, and those if absent")
    weights: list[float] | None = Field(None, description="one for each of eval.functions")
    threshold: float | None = Field(None, description="reward from which a completion is solved; the sum of positive weights if absent")
    split: str = "test"
    start: NonNegative = 0
    limit: Positive | None = Field(64, description="of each source")
    size: Positive | None = None
    every: Positive = Field(50, description="versions between two evaluations; the first and the last are always evaluated")
    samples: Positive = Field(4, description="sampled completions per prompt, in addition to the greedy one")
    temperature: PositiveFloat = 1.0
    max_new_tokens: Positive | None = None
    target: float | None = Field(None, description="greedy accuracy that ends the run")
    patience: Positive | None = Field(None, description="evaluations without a new best that end the run")


class WeightsSection(Section):
    chunk_mib: Annotated[int, Field(ge=1, le=8)] = 8
    partitions: Annotated[int, Field(ge=1, le=64)] = Field(
        8, description="of the topic `weights` that take the chunks of versions from 1 on"
    )
    keep: Literal["chain", "all"] = Field(
        "all", description="chain deletes versions before the last but one full snapshot; replaying them needs all"
    )
    anchor_every: Positive = Field(20, description="versions between two full snapshots; the others are deltas")
    encoding: Literal["auto", "merged", "adapter"] = Field(
        "auto", description="adapter, and auto with LoRA: versions are sent as adapters, which readers merge into version 0"
    )
    shared: bool = Field(True, description="the rollout workers of a machine keep one copy in shared memory, which one of them reads")
    transport: Literal["kafka", "ipc"] = Field(
        "kafka", description="ipc: rollout workers on the trainer's machine load from its memory; all others, and late ones, read the log"
    )
