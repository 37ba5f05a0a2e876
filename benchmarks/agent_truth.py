"""Are the tokens that a run trains those that its engine drew? Every trained token's logprob, once more, under the version that drew it.

    penstock run examples/agent.toml --set rollout.dtype=float32 --set rollout.kv_cache=recompute --run-id truth
    python benchmarks/agent_truth.py truth --model .penstock/smollm2

Each sequence of each trajectory goes through the model in float32, once for each version that drew in it. A token that was not drawn in
that place, or not under that version, shows as a difference far above rounding. Exits with status 1 above `--tolerance`.
"""

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

from penstock.infra.tensors.torch_copy import copy_into
from penstock.pipeline.cli.options import reading
from penstock.pipeline.runtime.topic_reader import RunReader
from penstock.pipeline.runtime.weights.read import fetch
from penstock.topics.rollouts import Rollout


def main() -> None:
    """Print how many tokens were compared and how far they are apart."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("run")
    arguments.add_argument("--model", type=Path, required=True, help="the model's directory, for its architecture")
    arguments.add_argument("--bootstrap", default="embedded")
    arguments.add_argument("--tolerance", type=float, default=1e-4)
    chosen = arguments.parse_args()
    with reading(chosen.run, chosen.bootstrap, None) as (log, run):
        reader = RunReader(log, run)
        prompts = {read.payload.group: read.payload.token_ids for read in reader.prompts() if read.payload is not None}
        samples = [read.payload for read in reader.samples() if read.payload is not None]
        manifests = {manifest.version: manifest for manifest in reader.manifests()}
        model = _model(chosen.model)
        differences: list[float] = []
        for version in sorted({int(version) for sample in samples for version in sample.token_versions[sample.loss_mask]}):
            copy_into(model, fetch(log, manifests, version, run=run))
            found = [value for sample in samples for value in _differences(model, sample, prompts[sample.group], version)]
            print(f"version {version}: {len(found)} tokens, at most {max(found, default=0.0):.2e} apart", flush=True)
            differences += found
    turns = sum(turn.source == "model" for sample in samples for turn in sample.turns or ())
    sequences = sum(len(sample.segments or (0,)) for sample in samples)
    print(f"{len(samples)} trajectories, {turns} turns, {sequences} sequences, {len(differences)} trained tokens")
    print(f"largest difference {max(differences):.2e}, mean {np.mean(differences):.2e} (nats)")
    raise SystemExit(max(differences) > chosen.tolerance)


def _model(directory: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def _differences(model: Any, sample: Rollout, prompt: Any, version: int) -> Iterator[float]:
    """Of each trained token of a version, how far its recorded logprob is from the model's."""
    for start, end, own_prompt in sample.segments or ((0, len(sample.token_ids), 0),):
        before = [] if own_prompt else prompt.tolist()
        wanted = sample.loss_mask[start:end] & (sample.token_versions[start:end] == version)
        if not wanted.any():
            continue
        ids = torch.tensor([*before, *sample.token_ids[start:end].tolist()])
        with torch.no_grad():
            logits = model(ids[None]).logits[0, :-1] / sample.temperature
        logprobs = torch.log_softmax(logits, -1).gather(1, ids[1:, None])[:, 0].numpy()
        ours = logprobs[len(logprobs) - (end - start) :] if before else np.concatenate([[np.nan], logprobs])
        yield from np.abs(ours[wanted] - sample.behaviour_logprobs[start:end][wanted]).tolist()


if __name__ == "__main__":
    main()
