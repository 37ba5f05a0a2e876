"""What the modes promise of each other: the same groups in the same steps, and the same bits at the end."""

from pathlib import Path

import pytest

from penstock.infra.memory.log import MemoryLog
from tests.support.crew import complete, config_of


@pytest.mark.parametrize("steps_per_version", [1, 2])
def test_synchronous_pipelined_and_pipelined_again_end_in_the_same_weights(run_id, tiny_model, tmp_path: Path, steps_per_version: int):
    def outcome(name: str, mode: str, workers: int) -> dict[str, object]:
        config = config_of(
            tiny_model,
            tmp_path,
            schedule={"mode": mode, "prompts_per_step": 4, "samples_per_prompt": 4, "steps_per_version": steps_per_version},
            rollout={"workers": workers},
        )
        return complete(MemoryLog(), f"{run_id}.{name}".replace(".", "-"), config)

    first, second, third = outcome("sync", "synchronous", 1), outcome("pipe", "pipelined", 2), outcome("again", "pipelined", 2)
    assert first["weights"]["digest"] == second["weights"]["digest"] == third["weights"]["digest"]
    assert first["reward"] == second["reward"] == third["reward"]
    assert first["groups"]["trained"] == 16
    assert second["lag"]["max"] == 0
