"""Checks across the sections of a configuration."""

from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

from penstock.infra.backends.registry import BACKENDS
from penstock.infra.engines.registry import ENGINES
from penstock.pipeline.algorithms.registry import CORRECTIONS
from penstock.pipeline.config.plugins import is_address, nearest, short_name
from penstock.pipeline.config.run_config import Config, source_name
from penstock.pipeline.scheduling.rules import MODES

MAX_SAMPLES = MAX_TURNS = 1 << 12
"""Group, sample and turn are encoded in one number of 63 bits, the seed of a turn's random numbers."""
NETWORKED = ("http:", "https:", "openenv:", "agent:")
"""Prefixes of sources whose child processes need the network; an agent connects to an endpoint of this machine."""

Check = Callable[[Config], Iterator[str]]


def first_mistake(config: Config) -> str | None:
    """One line about the first mistake between the sections of a configuration; None if there is none."""
    return next((line for check in CHECKS for line in check(config)), None)


def _length(config: Config) -> Iterator[str]:
    """Yield a line if the number of steps or the data is not set."""
    if (config.run.steps is None) == (config.run.epochs is None):
        yield "run.steps: set exactly one of run.steps and run.epochs"
    if not config.data_sources or not all(config.data_sources):
        yield "data.source: empty value; name a file or another source of prompts"


def _schedule(config: Config) -> Iterator[str]:
    """Yield a line for each key of a schedule that contradicts another, or that the engine does not support."""
    schedule = config.schedule
    if schedule.max_lag and MODES[schedule.mode].max_lag == 0:
        others = ", ".join(name for name, mode in MODES.items() if mode.max_lag > 0)
        yield f"schedule.max_lag: {schedule.max_lag} is impossible in mode {schedule.mode!r}, whose lag is 0; use one of {others}"
    if config.rules.loads_at == "step" and not config.engine.swaps_in_flight:
        able = " or ".join(repr(name) for name, kind in ENGINES.items() if kind.swaps_in_flight)
        yield f"schedule.mode: {config.schedule.mode!r} changes weights between decode steps; set rollout.engine = {able}"
    if config.rules.stale_in_hand != "finish" and config.rules.loads_at != "step":
        action = config.rules.stale_in_hand
        yield f"schedule.stale_in_hand: {action!r} needs a mode that changes weights between decode steps; set schedule.mode = 'bounded'"
    rules = config.rules
    if rules.oversample_groups and (rules.order != "arrival" or rules.loads_at != "step"):
        why = "order 'submission' waits for each group" if rules.order != "arrival" else "a straggler would hold up the next version"
        yield (f"schedule.oversample_groups: {rules.oversample_groups} is useless: {why}; use mode 'bounded' or 'in_flight' with 'arrival'")


def _sampling(config: Config) -> Iterator[str]:
    """Yield a line for each sampling limit that the engine or the loss does not support."""
    least, engine = config.engine.min_temperature, config.rollout.engine
    own = [(f"data.sampling.{source}", sampling.temperature) for source, sampling in config.data.sampling.items()]
    for section, value in (("sampling", config.sampling.temperature), ("eval", config.eval.temperature), *own):
        if value is not None and value < least:
            yield f"{section}.temperature: {engine} would raise {value} to {least}; set {least}, or use another rollout.engine"
    sampling = config.sampling
    if sampling.top_p < 1.0 and not sampling.top_k:
        yield (
            f"sampling.top_p: {sampling.top_p} truncates the distribution, and the remaining token ids must be recorded for the "
            "learner's ratio; set sampling.top_k too, for example to 50, to limit their number"
        )
    if sampling.top_k == 1:
        yield "sampling.top_k: 1 generates the same completion K times; use at least 2"
    key = "top_k" if sampling.top_k else "stop" if sampling.stop else None
    if key and config.environment.source is not None:
        yield f"sampling.{key}: only single completions support it, not the trajectories of environment.source; remove it"
    if key and config.rollout.engine == "toy":
        yield f"sampling.{key}: the toy engine has neither distribution nor text; remove it, or use another rollout.engine"


def _policies(config: Config) -> Iterator[str]:
    """Yield a line for each mistake about the policies that a step compares, and about how their weights are sent."""
    if config.weights.encoding == "adapter" and not config.trainer.lora_rank:
        yield "weights.encoding: 'adapter' needs a run with trainer.lora_rank above 0; set weights.encoding = 'auto'"
    if "quantization" in config.rollout.vllm and config.correction == "none" and config.proximal != "behaviour":
        yield (
            "rollout.vllm.quantization: quantised weights generate other samples than the trainer's, and algorithm.correction = 'none' "
            "leaves that uncorrected; remove algorithm.correction, or set it to 'tis'"
        )
    proximal, per_version = config.algorithm.proximal, config.schedule.steps_per_version
    if proximal == "current" and per_version != 1:
        yield f"algorithm.proximal: 'current' needs schedule.steps_per_version = 1, not {per_version}; use 'snapshot'"
    if proximal == "snapshot" and per_version == 1:
        yield "algorithm.proximal: with schedule.steps_per_version = 1 the 'snapshot' is the current policy; use 'current'"
    if config.algorithm.proximal == "behaviour" and config.correction != "none":
        instead = "current" if config.schedule.steps_per_version == 1 else "snapshot"
        yield (
            f"algorithm.correction: {config.correction!r} has no effect, because the ratio is already that to the behaviour policy and all "
            f"importance weights would be 1; set algorithm.proximal = {instead!r}"
        )


def _correction_bounds(config: Config) -> Iterator[str]:
    """Yield a line for each bound of importance weights that has no effect."""
    algorithm, correction = config.algorithm, config.correction
    for key in ("correction_low", "correction_high"):
        value = getattr(algorithm, key)
        if value is not None and correction == "none":
            yield f"algorithm.{key}: {value} bounds nothing without a correction; set algorithm.correction, for example 'tis'"
    if algorithm.correction_low is not None and not CORRECTIONS[correction].masks:
        yield (
            f"algorithm.correction_low: {algorithm.correction_low} has no effect, as {correction!r} only truncates from above; remove it, "
            f"or set algorithm.correction = {correction.replace('tis', 'mis')!r}"
        )


def _loss(config: Config) -> Iterator[str]:
    """Yield a line for each clip range that has no effect or contradicts another, and for a custom loss without its divisor."""
    algorithm, high = config.algorithm, 1.0 + config.clip_high
    dual, keys = algorithm.clip_dual, [key for key in ("clip_low", "clip_high", "clip_dual") if getattr(algorithm, key)]
    if algorithm.loss == "sapo" and keys:
        yield f"algorithm.{keys[0]}: 'sapo' has no clip range; remove the key"
    if dual and algorithm.loss == "cispo":
        yield f"algorithm.clip_dual: {dual} has no effect with 'cispo', which truncates every ratio at {high:g}; remove it"
    if dual and dual <= high:
        yield f"algorithm.clip_dual: {dual} is within the clip range, which ends at {high:g}; set a larger value, usually 3, or 0 for none"
    if ":" in algorithm.loss and algorithm.aggregate is None and algorithm.defaults > 1:
        yield (
            "algorithm.aggregate: a custom loss needs it, because the learner divides the returned sum: with 'token_mean' by the step's "
            "trained tokens, with 'sequence_mean' or 'constant' by its samples"
        )


def _value_head(config: Config) -> Iterator[str]:
    """Yield a line if the backend, the loss or the forward pass does not support a value head."""
    algorithm, backend = config.algorithm, config.trainer.backend
    if algorithm.value_lr is None:
        return
    if not BACKENDS[backend].value_head:
        able = " or ".join(repr(name) for name, kind in BACKENDS.items() if kind.value_head)
        yield f"algorithm.value_lr: the backend {backend!r} does not support a value head; set trainer.backend = {able}"
    if config.trainer.share_prompts == "off":
        yield "algorithm.value_lr: a value head needs hidden states, which trainer.share_prompts = 'off' does not compute; use 'auto'"
    if ":" in algorithm.loss:
        yield "algorithm.value_lr: a custom loss does not support the advantage per token of a value head; use a built-in loss"


def _combine(config: Config) -> Iterator[str]:
    """Yield a line for each change of the summed reward although advantages are combined by function."""
    algorithm = config.algorithm
    if algorithm.combine == "advantages" and algorithm.truncated == "penalise":
        yield (
            "algorithm.truncated: 'penalise' changes the sum of the rewards, which algorithm.combine = 'advantages' does not use; add "
            "'soft_overlong' to reward.functions"
        )
    if algorithm.combine == "advantages" and algorithm.kl_in == "reward":
        yield "algorithm.kl_in: 'reward' changes the sum of the rewards, which algorithm.combine = 'advantages' does not use; use 'loss'"


def _terms(config: Config) -> Iterator[str]:
    """Yield a line for each KL or entropy key that has no effect, or needs another key."""
    algorithm = config.algorithm
    if algorithm.kl_in == "reward" and not algorithm.kl_coef:
        yield "algorithm.kl_in: 'reward' needs algorithm.kl_coef, which is 0"
    if algorithm.kl_in == "reward" and algorithm.kl_weighted:
        yield "algorithm.kl_weighted: only the KL in the loss uses it; remove it, or set algorithm.kl_in = 'loss'"
    if algorithm.kl_in == "reward" and config.trainer.processes > 1:
        yield "algorithm.kl_in: 'reward' needs all samples of a group in one process; use 'loss', or set trainer.processes = 1"
    for coef in ("kl_coef", "entropy_coef"):
        if getattr(algorithm, f"final_{coef}") is not None and not getattr(algorithm, coef):
            yield f"algorithm.final_{coef}: needs algorithm.{coef} above 0, from which it decays"
    if algorithm.entropy_floor is not None and not algorithm.entropy_coef:
        yield f"algorithm.entropy_floor: {algorithm.entropy_floor} has no effect without an entropy bonus; set algorithm.entropy_coef"
    if algorithm.ess_floor is not None and config.rules.max_lag == 0:
        yield "algorithm.ess_floor: with max_lag 0 no prompt is admitted ahead of its round; remove it, or set schedule.max_lag"


def _sources(config: Config) -> Iterator[str]:
    """Yield a line for each key about single data sources that does not match the sources."""
    data, names = config.data, [source_name(source) for source in config.data_sources]
    if repeated := next((name for name in names if names.count(name) > 1), None):
        yield f"data.source: two sources have the same name {repeated!r}; rename one"
    if data.weights is not None and len(data.weights) != len(names):
        yield f"data.weights: {len(data.weights)} weights for {len(names)} sources; set one weight per source"
    for key, table in (("rewards", data.rewards), ("sampling", data.sampling)):
        if unknown := next((name for name in table if name not in names or len(names) == 1), None):
            yield f"data.{key}.{unknown}: data.source has no such source; expected one of {', '.join(names)}"
    rewards = {text for function in config.reward.functions for text in (function, short_name(function))}
    for source, functions in data.rewards.items():
        if unknown := next((name for name in functions if name not in rewards), None):
            yield f"data.rewards.{source}: {unknown!r} is not in reward.functions; add it there{nearest(unknown, rewards)}"
        if not functions:
            yield f"data.rewards.{source}: the list is empty, so completions of this source would have no reward; name a function"
    longest = config.sampling.max_new_tokens
    for source, sampling in data.sampling.items():
        if (sampling.max_new_tokens or 0) > longest:
            yield f"data.sampling.{source}.max_new_tokens: {sampling.max_new_tokens} is above sampling.max_new_tokens = {longest}"


def _rewards(config: Config) -> Iterator[str]:
    """Yield a line for each mistake in reward thresholds, weights and addresses, and for groups too small for an advantage."""
    solved, unsolved = config.data.skip_solved, config.data.skip_unsolved
    if solved is not None and unsolved is not None and solved <= unsolved:
        yield f"data.skip_solved: {solved} must be above data.skip_unsolved = {unsolved}, otherwise every row would be skipped"
    if not config.sampling.seeded and config.rollout.engine != "vllm":
        yield f"sampling.seeded: only rollout.engine = 'vllm' supports false; {config.rollout.engine!r} always seeds each sample"
    advantage = config.algorithm.advantage or ""
    if config.schedule.samples_per_prompt == 1 and ":" not in advantage and advantage != "reward":
        yield "schedule.samples_per_prompt: 1 leaves every group advantage at zero; use at least 2, or a custom algorithm.advantage"
    for section, reward in (("reward", config.reward), ("eval", config.eval)):
        weights, functions = reward.weights, reward.functions or ()
        if weights is not None and len(weights) != len(functions):
            yield f"{section}.weights: {len(weights)} weights for {len(functions)} {section}.functions; set one weight per function"
        for host in (urlsplit(name).hostname for name in functions if is_address(name) and "@" in urlsplit(name).netloc):
            yield f"{section}.functions: the address of {host} contains a password, and would be logged; set PENSTOCK_REWARD_TOKEN instead"


def _isolated_network(config: Config) -> Iterator[str]:
    """Yield a line if functions or environments are isolated from the network although they need it, or cannot be."""
    addresses = filter(is_address, (*config.reward.functions, *config.eval_reward.functions))
    remote = {"reward": next(addresses, None), "environment": config.environment.source}
    for section, children in (("reward", config.reward), ("environment", config.environment)):
        if not children.isolate_network:
            continue
        if children.isolate not in ("bwrap", "auto"):
            yield f'{section}.isolate_network: needs {section}.isolate = "bwrap" or "auto"'
        if (name := remote[section]) and name.startswith(NETWORKED):
            yield f"{section}.isolate_network: {name.partition(':')[0]} needs the network; set {section}.isolate_network = false"


def _tracking_uri(config: Config) -> Iterator[str]:
    try:
        urlsplit(config.mlflow.tracking_uri or "")
    except ValueError as error:
        yield f"mlflow.tracking_uri = {config.mlflow.tracking_uri!r}: {error}"


def _eval(config: Config) -> Iterator[str]:
    """Yield a line for each mistake about evaluation, and about the state that a forked run starts from."""
    names = [source_name(source) for source in config.eval_sources]
    if repeated := next((name for name in names if names.count(name) > 1), None):
        yield f"eval.source: two sources have the same name {repeated!r} in the measurements; rename one"
    if (config.trainer.initial_state is None) != (config.trainer.initial_steps == 0):
        yield "trainer.initial_state: needs trainer.initial_steps, the number of optimizer steps before it; `penstock fork` sets both"


def _workers(config: Config) -> Iterator[str]:
    """Yield a line if workers would have no partition, and for each pool of workers that contradicts another or their number."""
    needed = max(config.rollout.workers, config.scorer.workers, config.environment_workers)
    if config.partitions < needed:
        yield f"kafka.partitions: {config.partitions} are fewer than the {needed} workers of one role, and each worker needs one; raise it"
    pools, tags = config.rollout.pools, [tag for pool in config.rollout.pools.values() for tag in pool.tags]
    if not pools:
        if config.data.tag_field is not None:
            yield "data.tag_field: the key selects a pool for each prompt, but rollout.pools is empty; add pools"
        return
    if config.data.tag_field is None:
        yield "rollout.pools: set data.tag_field, the column of the data that selects a pool for each prompt"
    if len(config.pools) != config.rollout.workers:
        yield (f"rollout.workers: {config.rollout.workers}, but rollout.pools have {len(config.pools)} workers in all; make them equal")
    if twice := next((tag for tag in tags if tags.count(tag) > 1), None):
        yield f"rollout.pools: two pools have the tag {twice!r}; each tag must belong to one pool"
    if sum(not pool.tags for pool in pools.values()) > 1:
        yield "rollout.pools: two pools have no tags, so both would sample all other prompts; set tags for one of them"
    for name, pool in pools.items():
        if unknown := next((other for other in pool.fallback if other not in pools or other == name), None):
            yield f"rollout.pools.{name}.fallback: {unknown!r} is not another pool; the pools are {', '.join(pools)}"


def _devices(config: Config) -> Iterator[str]:
    """Yield a line for a mistake in the backend's keys, and for processes that cannot share one device in a colocated run."""
    if problem := BACKENDS[config.trainer.backend].check(config.trainer.model_dump()):
        yield problem
    if not config.colocated:
        return
    key = "launch.placement: 'colocated'"
    for name, chosen, kinds in (("trainer.backend", config.trainer.backend, BACKENDS), ("rollout.engine", config.rollout.engine, ENGINES)):
        if not kinds[chosen].sleeps:
            able = " or ".join(repr(other) for other, kind in kinds.items() if kind.sleeps)
            yield f"{key} needs processes that free the device while they wait, which {chosen!r} does not; set {name} = {able}"
    for name, count in (("trainer.processes", config.trainer.processes), ("rollout.workers", config.rollout.workers)):
        if count > 1:
            yield f"{key} shares one device between one trainer process and one rollout worker; set {name} = 1, not {count}"
    if config.eval_sources and not config.evaluates_on_rollout_engine:
        yield f"{key} leaves no device memory for the evaluator's engine; set eval.engine = 'rollout'"


def _early_stopping(config: Config) -> Iterator[str]:
    if (config.eval.target is not None or config.eval.patience is not None) and not config.eval_sources:
        yield "eval.source: early stopping (eval.target, eval.patience) needs held-out prompts"


def _environment(config: Config) -> Iterator[str]:
    """Yield a line for each key that needs an environment, or that trajectories do not support."""
    source = config.environment.source
    if source is None and "environment" in (*config.reward.functions, *config.eval_reward.functions):
        yield "reward.functions: 'environment' takes its rewards from an environment; set environment.source"
    if source is None and config.environment.carrier == "log":
        yield "environment.carrier: 'log' has no effect without an environment; set environment.source"
    if source is not None and config.rules.stale_in_hand == "continue":
        yield "schedule.stale_in_hand: 'continue' masks stale tokens, which trajectories do not support; use 'finish' or 'abort'"
    if source is not None and config.schedule.samples_per_prompt + config.schedule.oversample > MAX_SAMPLES:
        yield f"schedule.samples_per_prompt: with oversample it exceeds the limit of {MAX_SAMPLES} trajectories per group; lower it"
    if source is not None and config.environment.max_turns > MAX_TURNS:
        yield f"environment.max_turns: {config.environment.max_turns} exceeds the limit of {MAX_TURNS} turns per trajectory; lower it"
    if source is not None and config.environment.history != "exact" and config.aggregate != "token_mean":
        yield (
            f"environment.history: 'template' splits a trajectory into several sequences, which {config.aggregate!r} would count as "
            "samples; set algorithm.aggregate = 'token_mean', or history = 'exact'"
        )


def _keep_steps(config: Config) -> Iterator[str]:
    """Yield a line if fewer steps would be retained than the run still needs, or if retention has no effect."""
    steps, rules = config.kafka.keep_steps, config.rules
    if steps is None:
        if config.kafka.archive is not None:
            yield "kafka.archive: only kafka.keep_steps deletes records; set that too"
        return
    least = rules.steps_per_version * (rules.max_lag + 2)
    if steps < least:
        yield (f"kafka.keep_steps: {steps} would delete samples still needed; set at least {least}: steps_per_version x (max_lag + 2)")
    if not config.trainer.checkpoint_every:
        yield f"kafka.keep_steps: {steps} has no effect, because only steps before a checkpoint are deleted; set trainer.checkpoint_every"
    if config.data.skip_solved is not None or config.data.skip_unsolved is not None:
        yield "kafka.keep_steps: data.skip_solved and skip_unsolved need the outcomes of a full epoch; remove one of the keys"


CHECKS: tuple[Check, ...] = (
    _length, _schedule, _sampling, _policies, _correction_bounds, _loss, _value_head, _combine, _terms, _sources, _rewards,
    _isolated_network, _tracking_uri, _eval, _workers, _devices, _early_stopping, _environment, _keep_steps,
)  # fmt: skip
