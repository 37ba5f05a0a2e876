"""What publishing takes from a trainer that computes, and what reading takes in memory: a part of benchmarks/weights.py.

The trainer is a process of its own with a model of the shapes of Qwen2.5-0.5B in bfloat16. Steps of some ten seconds, forward and backward
passes by PyTorch, alternate: one alone, one during which a version is published. Its stall is what the second takes longer, and the copy of
the weights before it. Memory is the peak of the resident set (`VmHWM`): the trainer's over that of its steps alone, the reader's over what
it held before.
"""

import multiprocessing
import os
import statistics
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from penstock.infra.kafka.log import KafkaLog
from penstock.infra.tensors.weight_copy import WeightCopy
from penstock.pipeline.config.services import WeightsSection
from penstock.pipeline.runtime.weights.read import bring
from penstock.topics.weights import Manifest

STEP_S = 10.0
TOKENS = 64
"""Of a forward and backward pass."""
SLACK_BYTES = 256 << 20


def measure(bootstrap: str, *, run: str, partitions: int, layers: int, changed: float, rounds: int) -> dict[str, float]:
    """The trainer's stall by kind of version [s], the step's length [s], and what trainer and reader hold beside the model [bytes]."""
    found = _in_process(trainer, bootstrap, run, partitions, layers, changed, rounds)
    return found["measured"] | _in_process(reader, bootstrap, run, found["manifests"])


def trainer(bootstrap: str, run: str, partitions: int, layers: int, changed: float, rounds: int) -> dict[str, Any]:
    """Publish a version during every second step: whole and as a delta in turn."""
    import torch

    from penstock.infra.tensors.torch_copy import to_bytes
    from penstock.pipeline.learner.policy_trainer import Weights
    from penstock.workers.trainer.weight_publisher import WeightPublisher

    torch.set_num_threads(max(1, (os.cpu_count() or 1) // 2))
    model, generator = _model(layers), torch.Generator().manual_seed(0)
    ids = torch.randint(0, 1000, (1, TOKENS), generator=generator)

    def step(passes: int) -> float:
        began = time.perf_counter()
        for _ in range(passes):
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        return time.perf_counter() - began

    step(1)
    _forget_peak()
    passes = max(1, round(STEP_S / step(1)))
    alone = _resident("VmHWM")
    log, manifests = KafkaLog(bootstrap), dict[int, Manifest]()
    publisher = WeightPublisher(log, run, WeightsSection(anchor_every=2), partitions)
    whole = sum(parameter.nbytes for parameter in model.parameters())
    stalls: dict[str, list[float]] = {"full": [], "delta": []}
    alone_s = []
    _forget_peak()
    for version in range(2 * rounds + 1):
        alone_s.append(step(passes))
        _change(model, changed, generator)
        began = time.perf_counter()
        content = Weights(lambda: to_bytes(model.named_parameters()))
        assert content.tensors
        publication = publisher.start(content, version=version, step=version, manifests=manifests)
        copied_s = time.perf_counter() - began
        beside_s = step(passes)
        manifests[version] = publisher.finish(publication)
        publisher.committed(publication)
        if version:  # the first one has nothing to be compared with, and connects
            stalls[manifests[version].encoding].append(copied_s + beside_s - alone_s[-1])
        del content, publication
    peak = _resident("VmHWM")
    publisher.close()
    log.close()
    measured = {
        "step_s": statistics.median(alone_s),
        **{f"stall_{kind}_s": statistics.median(values) for kind, values in stalls.items()},
        "trainer_bytes": float(peak - alone - 2 * whole),
    }
    return {"measured": measured, "manifests": manifests}


def reader(bootstrap: str, run: str, manifests: Mapping[int, Manifest]) -> dict[str, float]:
    """Bring a copy to every version in turn."""
    log, copy = KafkaLog(bootstrap), WeightCopy()
    held = _resident("VmRSS")
    for version in manifests:
        bring(copy, log, manifests, version, run=run)
    log.close()
    return {"reader_bytes": float(_resident("VmHWM") - held - len(copy.data))}


def _model(layers: int) -> Any:
    """A model of the benchmark's shapes, with random weights."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=151_936, hidden_size=896, intermediate_size=4864, num_hidden_layers=layers, num_attention_heads=14,
        num_key_value_heads=2, tie_word_embeddings=True, dtype="bfloat16",
    )  # fmt: skip
    torch.manual_seed(0)
    return Qwen2ForCausalLM(config).to(torch.bfloat16)


def _change(model: Any, share: float, generator: Any) -> None:
    """Flip the lowest bit of this share of the elements, as a small update does."""
    import torch

    for parameter in model.parameters():
        flat = parameter.data.view(-1).view(torch.int16)
        places = torch.randint(0, len(flat), (max(1, int(len(flat) * share)),), generator=generator)
        flat[places] = flat[places] ^ 1


def _in_process(function: Any, *arguments: Any) -> Any:
    """What a function returns in a fresh process."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_answer, args=(theirs, function, arguments))
    process.start()
    theirs.close()
    try:
        return ours.recv()
    except EOFError:
        raise SystemExit(f"the {function.__name__} process died") from None
    finally:
        process.join()


def _answer(to: Connection, function: Any, arguments: Any) -> None:
    to.send(function(*arguments))


def _resident(name: str) -> int:
    """`VmRSS` or `VmHWM` of this process, in bytes (proc(5))."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


def _forget_peak() -> None:
    """Set `VmHWM` to what is resident now."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
