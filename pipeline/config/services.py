"""The tables of what a run stands on and reports to: Kafka, MLflow, TensorBoard, Weights & Biases.

The rule: as in `penstock.pipeline.config.schema`; no key here decides what a step is.
"""

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
        GIVE_UP_S, description="a worker whose broker has not answered for so long says so and ends, for the launcher to start it again"
    )
    session_s: float = Field(
        SESSION_S,
        ge=1.0,
        le=300.0,
        description="partitions of a worker that was not heard of for so long go to others; more where workers stand still for longer, "
        "as on busy or frozen machines, within the broker's group.min.session.timeout.ms and group.max.session.timeout.ms",
    )
    keep_steps: Positive | None = Field(
        None,
        description="prompts, samples and groups of steps before the newest so many are deleted, but nothing that an open group or a "
        "checkpoint needs; nothing is if absent",
    )
    archive: Annotated[str | None, Resolve(absolute)] = Field(
        None, description="folder that the run is exported into before anything is deleted by keep_steps"
    )
    security: dict[str, str] = Field(
        default_factory=dict,
        exclude=True,  # no record and no file gets it: every process takes it from its own environment
        repr=False,
        description="security_protocol, sasl_mechanism, sasl_plain_username, …; passwords in PENSTOCK_SECURITY only",
    )

    @property
    def copies(self) -> Copies:
        """What the run's topics are made with."""
        return Copies(replicas=self.replication_factor, in_sync=self.min_insync_replicas, loss_allowed=self.allow_loss)


class LaunchSection(Section):
    placement: Literal["separate", "colocated"] = Field(
        "separate",
        description="colocated: trainer and rollout worker compute on one device by turns, and the memory of the one that waits is free",
    )
    environments: Positive = Field(
        1, description='environment workers that `penstock run` starts, where environment.carrier is "log"; more may join'
    )
    pin: Literal["auto", "off"] = Field(
        "off",
        description="whether `penstock run` keeps rollout workers and trainer on cores of their own",
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
