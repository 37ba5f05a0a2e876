"""From an agent's program to what is trained: ids as the engine drew them, logprobs as the model has them, over all segments."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.infra.engines.base import Completion, EngineSettings, Sampling
from penstock.infra.engines.registry import ENGINES
from penstock.pipeline.agents.driver import Limits
from penstock.pipeline.agents.engine import TrajectoryEngine
from penstock.pipeline.agents.record import EpisodeRequest, Trajectory
from penstock.pipeline.data.conversation.template import template_of
from penstock.pipeline.data.tokenization import digests
from tests.support.chat_families import source, tokenizer

pytestmark = pytest.mark.costly
FAMILY = "qwen2_5"
AGENT = """
import asyncio, sys
from openai import AsyncOpenAI
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}}}
async def main(question, sample):
    client = AsyncOpenAI()
    async def ask(messages):
        chat = await client.chat.completions.create(model="any", messages=messages, tools=[TOOL], temperature=0.0)
        return chat.choices[0].message.model_dump(exclude_none=True)
    messages = [{"role": "user", "content": question}]
    for turn in range(3):
        messages += [await ask(messages), {"role": "user", "content": f"And {turn}?"}]
    if sample == 1:  # side by side, and with a history of its own
        await asyncio.gather(ask(messages), ask([{"role": "user", "content": "In short?"}]))
asyncio.run(main(sys.argv[1], int(sys.argv[2])))
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model with a chat template."""
    import transformers as hf

    path = tmp_path_factory.mktemp("chat")
    torch.manual_seed(1)
    config = hf.Qwen3Config(
        vocab_size=tokenizer(FAMILY).get_vocab_size(), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=1024, initializer_range=0.2, tie_word_embeddings=True,
        eos_token_id=tokenizer(FAMILY).token_to_id("<|im_end|>"),
    )  # fmt: skip
    hf.AutoModelForCausalLM.from_config(config).save_pretrained(path)
    tokenizer(FAMILY).save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text("{}")
    (path / "chat_template.jinja").write_text(source(FAMILY))
    return path


def play(directory: Path, agent: Path) -> tuple[list[Trajectory], list[Completion]]:
    """Three trajectories of the agent, and every turn that the engine drew for them."""
    settings = EngineSettings(directory=directory, device="cpu", concurrency=8, longest=1024)
    inner = ENGINES["transformers"].open(settings)
    turns: list[Completion] = []
    step = inner.step

    def noted() -> list[Completion]:
        turns.extend(drawn := step())
        return drawn

    inner.step = noted  # type: ignore[method-assign]
    limits = Limits(
        max_turns=8, turn_tokens=12, trajectory_tokens=1024, reset_timeout_s=60, step_timeout_s=60, trajectory_timeout_s=60,
        retries=0, replay=False,
    )  # fmt: skip
    stop_ids = tuple(digests(directory)["stop_ids"])
    engine = TrajectoryEngine(
        inner, source=f"agent:{sys.executable} {agent} {{prompt}} {{sample}}", template=template_of(directory, stop_ids=stop_ids),
        limits=limits, processes=3, in_flight=3,
    )  # fmt: skip
    request = EpisodeRequest(
        group=2, prompt_ids=np.array([1], np.int32), samples=(0, 1, 2), rows=3, seed=7,
        sampling=Sampling(max_new_tokens=12, stop_ids=stop_ids), messages=None, prompt="What is 3 + 4?", row={},
    )  # fmt: skip
    ended: list[Any] = []
    try:
        engine.submit(request)
        while not engine.idle:
            ended += engine.step()
    finally:
        engine.close()
    return sorted(ended, key=lambda trajectory: trajectory.sample), turns


def test_an_agent_of_the_openai_client_is_trained_on_what_the_engine_drew_and_its_logprobs_are_the_models(
    directory: Path, tmp_path: Path
) -> None:
    import transformers as hf

    agent = tmp_path / "agent.py"
    agent.write_text(AGENT, encoding="utf-8")
    trajectories, turns = play(directory, agent)
    assert [trajectory.finish for trajectory in trajectories] == ["stop", "stop", "stop"], [t.turns[-1] for t in trajectories]
    # The fourth question of sample 1 goes on, the fifth has another history.
    assert [len(trajectory.segments) for trajectory in trajectories] == [1, 2, 1]
    drawn = sorted(token for turn in turns for token in turn.token_ids.tolist())
    assert sorted(token for t in trajectories for token in t.token_ids[t.loss_mask].tolist()) == drawn
    by_ids = {tuple(turn.token_ids.tolist()): turn.logprobs for turn in turns}
    model = hf.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    for trajectory in trajectories:
        for part in (part for part in trajectory.turns if part.source == "model"):
            ids = trajectory.token_ids[part.start : part.end]
            assert (trajectory.logprobs[part.start : part.end] == by_ids[tuple(ids.tolist())]).all()
        for start, end, _ in trajectory.segments:
            ids, mask = torch.from_numpy(trajectory.token_ids[start:end].astype(np.int64)), trajectory.loss_mask[start:end]
            with torch.no_grad():
                logprobs = torch.log_softmax(model(ids[None]).logits[0, :-1], -1).gather(1, ids[1:, None])[:, 0].numpy()
            assert np.abs(logprobs[mask[1:]] - trajectory.logprobs[start:end][mask]).max() < 1e-4
