"""What is the default on a GPU, tried on a CPU: asynchronous scheduling, prompts in chunks, preemption, a model in two processes."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from penstock.infra.engines.base import Completion
from tests.support.paths import ROOT, SUPPORT
from tests.support.vllm_helpers import LIMIT, completions, largest_error, request, save_model, version_values

pytestmark = [pytest.mark.costly, pytest.mark.slow, pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")]

LIMIT_S = 400
AS_ON_A_GPU = {"async_scheduling": True, "enable_chunked_prefill": True, "max_num_batched_tokens": 64}
FEW_BLOCKS = {"num_gpu_blocks_override": 24}
"""Of 32 tokens: sixteen samples of 70 to 160 tokens, of which some have to give way."""


def drawn(directory: Path, out: Path, settings: dict[str, Any]) -> tuple[list[Completion], dict[str, Any]]:
    """What an engine drew in a process of its own, while its weights changed."""
    command = [sys.executable, str(SUPPORT / "vllm_owner.py"), str(directory), str(out), "end", json.dumps(settings)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(out.read_text(encoding="utf-8"))
    return completions(found), found


@pytest.mark.parametrize("kv_cache", ["recompute", "keep"])
def test_labels_are_true_under_asynchronous_scheduling_chunked_prompts_and_preemption(tmp_path: Path, kv_cache: str) -> None:
    directory = save_model(tmp_path / "model", tied=True)
    asking = {"tokens": 120, "prompt": 40, "seeded": False}
    engine = {"kv_cache": kv_cache, "arguments": AS_ON_A_GPU | FEW_BLOCKS}
    found, report = drawn(directory, tmp_path / "out", {"engine": engine, "request": asking, "groups": 8, "every": 30})
    tokens = sum(len(one.token_ids) for one in found)
    print(f"{tokens} tokens, {report['swaps']} swaps, {report['stats']}")
    assert report["swaps"] >= 3 and max(len(one.spans) for one in found) >= 2
    assert report["stats"]["preemptions"] > 0
    if kv_cache == "keep":  # behind a swap, keys and values are of older weights: only what was drawn before it can be computed again
        found = [_first_span(one) for one in found]
    asked = {group: request(group, **asking) for group in range(8)}
    assert largest_error(directory, asked, found, version_values(directory)) < LIMIT


def test_labels_are_true_where_the_model_is_split_over_two_processes(tmp_path: Path) -> None:
    directory = save_model(tmp_path / "model", tied=False)
    engine = {"engine_process": False, "arguments": {"tensor_parallel_size": 2}}
    found, report = drawn(directory, tmp_path / "out", {"engine": engine, "request": {"tokens": 60}, "groups": 6, "every": 20})
    assert report["swaps"] >= 2 and max(len(one.spans) for one in found) >= 2
    assert largest_error(directory, {group: request(group, tokens=60) for group in range(6)}, found, version_values(directory)) < LIMIT


def _first_span(one: Completion) -> Completion:
    end = one.spans[1].start if len(one.spans) > 1 else len(one.token_ids)
    return Completion(
        group=one.group, sample=one.sample, token_ids=one.token_ids[:end], logprobs=one.logprobs[:end], finish=one.finish,
        spans=one.spans[:1], started_ns=0, ended_ns=0,
    )  # fmt: skip
