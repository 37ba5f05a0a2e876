"""Configuration sections for Kafka, the launcher, MLflow, TensorBoard and Weights & Biases; none of their keys affects a step."""

from typing import Annotated, Literal

from pydantic import Field

from penstock.infra.log import GIVE_UP_S, SESSION_S, Copies
from penstock.pipeline.config.fields import Positive, PositiveFloat, Resolve, Section, absolute


class KafkaSection(Section):
    bootstrap: str = Field("embedded", description='"embedded", or HOST:PORT[,HOST:PORT]')
    partitions: Positive | None = Field(
        None, description="of prompts, rollouts and groups; 4 x the most workers of one role, at least 8, if absent"
    )
    replication_factor: Positive | None = Field(
        None, description="copies of each record; three, or as many as there are brokers, if absent"
    )
    min_insync_replicas: Positive | None = Field(
        None, description="copies that must have a record before it is acknowledged; 2, on one broker 1, if absent"
    )
    allow_loss: bool = Field(
        False, description="takes fewer than two copies in sync on several brokers: the loss of one node can then lose acknowledged records"
    )
    give_up_s: PositiveFloat = Field(
        GIVE_UP_S, description="seconds without a response of the broker after which a worker exits with an error and is restarted"
    )
    session_s: float = Field(
        SESSION_S,
        ge=1.0,
        le=300.0,
        description="seconds without a heartbeat after which a worker's partitions are reassigned; more for workers on busy or frozen "
        "machines, within the broker's group.min.session.timeout.ms and group.max.session.timeout.ms",
    )
    keep_steps: Positive | None = Field(
        None,
        description="newest steps whose prompts, samples and groups are retained; older ones are deleted unless an open group or a "
        "checkpoint needs them; all are retained if absent",
    )
    archive: Annotated[str | None, Resolve(absolute)] = Field(
        None, description="folder that the run is exported into before anything is deleted by keep_steps"
    )
    security: dict[str, str] = Field(
        default_factory=dict,
        exclude=True,  # never written to a record or file: every process reads it from its own environment
        repr=False,
        description="security_protocol, sasl_mechanism, sasl_plain_username, …; passwords in PENSTOCK_SECURITY only",
    )

    @property
    def copies(self) -> Copies:
        """Replication of the run's topics."""
        return Copies(replicas=self.replication_factor, in_sync=self.min_insync_replicas, loss_allowed=self.allow_loss)


class LaunchSection(Section):
    placement: Literal["separate", "colocated"] = Field(
        "separate",
        description="colocated: trainer and rollout worker share one device alternately; the one that waits frees its memory",
    )
    environments: Positive = Field(
        1, description='environment workers that `penstock run` starts if environment.carrier is "log"; more may join'
    )
    pin: Literal["auto", "off"] = Field(
        "off",
        description="auto pins rollout workers and trainer to cores of their own",
    )


class TensorboardSection(Section):
    enabled: bool = Field(False, description="event files in the run's folder")


class WandbSection(Section):
    enabled: bool = Field(False, description="a Weights & Biases run of the same id; its key comes from WANDB_API_KEY")
    project: str = "penstock"
    mode: Literal["online", "offline"] = "online"


class MlflowSection(Section):
    enabled: bool = True
    tracking_uri: str | None = Field(None, description="a sqlite file in the state directory if absent")
    experiment: str = "penstock"
