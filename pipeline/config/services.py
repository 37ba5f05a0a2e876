"""Configuration sections for the transport of weights, Kafka, the launcher and trackers; none of their keys affects a step."""

from typing import Annotated, Literal

from pydantic import Field

from penstock.infra.log import GIVE_UP_S, SESSION_S, Copies
from penstock.pipeline.config.fields import Positive, PositiveFloat, Resolve, Section, absolute


class WeightsSection(Section):
    chunk_mib: Annotated[int, Field(ge=1, le=8)] = Field(8, description="size of a chunk in the topic `weights`")
    partitions: Annotated[int, Field(ge=1, le=64)] = Field(8, description="partitions of `weights` for the chunks of versions 1 and later")
    keep: Literal["chain", "all"] = Field(
        "all",
        description="`chain` deletes versions that newer ones do not build on; `penstock replay rollout` under old versions needs `all`",
    )
    anchor_every: Positive = Field(20, description="versions after which a full snapshot is written besides the lossless deltas")
    encoding: Literal["auto", "merged", "adapter"] = Field(
        "auto", description="send versions as LoRA adapters (`adapter`, and `auto` in a LoRA run) or as merged full weights (`merged`)"
    )
    shared: bool = Field(True, description="rollout workers of a machine share one copy of the weights in memory (Linux)")
    transport: Literal["kafka", "ipc"] = Field(
        "kafka", description="`ipc`: rollout workers on the trainer's machine load versions from its memory"
    )


class KafkaSection(Section):
    bootstrap: str = Field("embedded", description="`embedded`: the broker of this machine; or `HOST:PORT[,HOST:PORT]`")
    partitions: Positive | None = Field(
        None,
        description="partitions of `prompts`, `rollouts` and `groups`; if absent 4 x the most workers of a role, at least 8",
    )
    replication_factor: Positive | None = Field(None, description="replicas of each record; if absent 3, or one per broker if fewer")
    min_insync_replicas: Positive | None = Field(None, description="replicas that must acknowledge a record; if absent 2, on one broker 1")
    allow_loss: bool = Field(
        False, description="accept fewer than 2 in-sync replicas on several brokers, where losing a broker can lose records"
    )
    give_up_s: PositiveFloat = Field(GIVE_UP_S, description="seconds without a response of the broker after which a worker exits")
    session_s: float = Field(
        SESSION_S, ge=1.0, le=300.0, description="seconds without a heartbeat after which a worker's partitions are reassigned"
    )
    keep_steps: Positive | None = Field(
        None, description="number of newest steps whose prompts, samples and groups are retained; all if absent"
    )
    archive: Annotated[str | None, Resolve(absolute)] = Field(
        None, description="directory to which records are exported before `keep_steps` deletes them"
    )
    security: dict[str, str] = Field(
        default_factory=dict,
        exclude=True,  # never written to a record or file: every process reads it from its own environment
        repr=False,
        description=(
            "`security_protocol`, `sasl_mechanism`, `sasl_plain_username`, `ssl_cafile`, `ssl_certfile`, `ssl_keyfile`, "
            "`ssl_check_hostname`, `sasl_oauth_token_file` or `sasl_oauth_token_command`; passwords only in "
            "`PENSTOCK_SECURITY`. Never written to the log"
        ),
    )

    @property
    def copies(self) -> Copies:
        """Replication of the run's topics."""
        return Copies(replicas=self.replication_factor, in_sync=self.min_insync_replicas, loss_allowed=self.allow_loss)


class LaunchSection(Section):
    placement: Literal["separate", "colocated"] = Field(
        "separate", description="`colocated`: trainer and a rollout worker time-share a device"
    )
    environments: Positive = Field(1, description='environment workers that `penstock run` starts under `environment.carrier = "log"`')
    pin: Literal["auto", "off"] = Field("off", description="`auto`: pin rollout workers and trainer to separate cores")


class TensorboardSection(Section):
    enabled: bool = Field(False, description="write event files to `runs/RUN/tensorboard`")


class WandbSection(Section):
    enabled: bool = Field(False, description="send metrics to a Weights & Biases run with the same id; needs `WANDB_API_KEY`")
    project: str = Field("penstock", description="project at Weights & Biases")
    mode: Literal["online", "offline"] = Field("online", description="`offline` writes to `runs/RUN/wandb`, for `wandb sync`")


class MlflowSection(Section):
    enabled: bool = Field(True, description="send metrics to MLflow; `metrics.jsonl` is written either way")
    tracking_uri: str | None = Field(None, description="MLflow tracking URI; a sqlite file in the state directory if absent")
    experiment: str = Field("penstock", description="MLflow experiment")
