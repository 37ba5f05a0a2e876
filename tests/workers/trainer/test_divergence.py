"""A run that diverges publishes no broken version, and its last line is a command that can be pasted."""

from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from penstock.infra.errors import Diverged
from penstock.infra.memory.log import MemoryLog
from penstock.infra.tensors.stream import TensorBytes
from penstock.pipeline.config.services import WeightsSection
from penstock.pipeline.learner.policy_trainer import Weights
from penstock.topics.catalogue import topics_of
from penstock.workers.trainer.weight_publisher import WeightPublisher
from penstock.workers.trainer.worker import Trainer


def weights_of(value: float) -> Weights:
    data = np.array([1.0, value], np.float32).tobytes()
    return Weights(lambda: [TensorBytes(name="layer.weight", dtype="float32", shape=(2,), data=data)])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e30, -1e30])
def test_a_version_that_is_not_finite_is_not_published(value: float) -> None:
    log = MemoryLog()
    log.create_topics(topics_of("r", partitions=1))
    publisher = WeightPublisher(log, "r", WeightsSection(), 2)
    line = r"optimizer step 6 made weights in layer\.weight that are not finite .* weights version 3 is not published"
    with pytest.raises(Diverged, match=line):
        publisher.finish(publisher.start(weights_of(value), version=3, step=7, manifests={}))
    assert publisher.finish(publisher.start(weights_of(2.0), version=3, step=7, manifests={})).version == 3
    publisher.close()


def test_the_way_back_names_the_run_and_the_last_finite_step() -> None:
    manifests = {version: SimpleNamespace(version=version, step=2 * version) for version in range(4)}
    trainer = SimpleNamespace(
        session=SimpleNamespace(run="r", config=SimpleNamespace(trainer=SimpleNamespace(lr=1e-3))),
        writer=SimpleNamespace(state=SimpleNamespace(manifests=manifests)),
        policy=SimpleNamespace(steps_done=7),
    )
    line = Trainer.way_back(cast(Trainer, trainer))
    assert "`" not in line and "the samples of step 7" in line
    assert line.endswith("penstock fork r --from-step 6 --set trainer.lr=0.0001 --start")
