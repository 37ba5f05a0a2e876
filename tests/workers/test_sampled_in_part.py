"""Runs whose sampling or loss has terms beyond the usual ones: labels stay true, and what is measured says so."""

import math
from pathlib import Path

from penstock.infra.memory.log import MemoryLog
from penstock.pipeline.runtime.topic_reader import RunReader
from tests.support.worker_set import clean, complete, config_of


def test_a_run_that_draws_from_the_likeliest_tokens_trains_the_distribution_it_drew_from(run_id, tiny_model, tmp_path: Path) -> None:
    config = config_of(
        tiny_model,
        tmp_path,
        run={"steps": 3, "seed": 7},
        schedule={"mode": "pipelined", "prompts_per_step": 2, "samples_per_prompt": 4},
        sampling={"max_new_tokens": 12, "top_k": 6, "top_p": 0.9, "stop": [*"abcdefghijklm", "no such text"]},
        algorithm={"filter_zero_variance": False, "kl_coef": 0.1, "kl_in": "reward", "entropy_coef": 0.01, "entropy_floor": 1.0},
        trainer={"lr": 3e-3, "micro_batch_tokens": 60, "peak_tflops": 0.05},
    )
    log = MemoryLog()
    report = complete(log, run_id, config)
    assert (report["status"], report["steps"]) == ("finished", 3)
    clean(log, run_id)
    reader = RunReader(log, run_id)
    steps = [entry.metrics for entry in reader.entries() if entry.kind == "step"]
    for measured in steps:
        assert measured["ess"] > 0.9999 and measured["kl_behaviour_k3"] < 1e-6  # without a lag learner and engine agree on each token
        assert 0 < measured["entropy"] <= math.log(6)
        assert 0 < measured["mfu"] < 1 and measured["model_tflops_per_s"] > 0
    assert abs(steps[0]["kl_reference_k1"]) < 1e-6 < abs(steps[2]["kl_reference_k1"])  # version 0 is the reference itself
    samples = [read.payload for read in reader.samples() if read.payload is not None]
    assert all(sample.support is not None and len(sample.support) <= 6 * len(sample.token_ids) for sample in samples)
    ended = [sample for read in reader.groups() if read.payload is not None for sample in read.payload.samples]
    assert any(one.completion[-1:] in "abcdefghijklm" for one in ended if one.completion)
    assert not any(set("abcdefghijklm") & set(one.completion[:-1]) for one in ended)


def test_after_a_step_that_was_far_off_policy_no_prompt_is_admitted_before_the_version_of_its_round(
    run_id, tiny_model, tmp_path: Path
) -> None:
    config = config_of(
        tiny_model,
        tmp_path,
        run={"steps": 6, "seed": 7},
        schedule={"mode": "in_flight", "max_lag": 2, "prompts_per_step": 1, "samples_per_prompt": 2},
        algorithm={"filter_zero_variance": False, "ess_floor": 1.0},  # the toy's logprobs are not the model's: no step is above it
        rollout={"engine": "toy", "workers": 1},
    )
    log = MemoryLog()
    report = complete(log, run_id, config)
    assert (report["status"], report["steps"]) == ("finished", 6)
    clean(log, run_id)
    reader = RunReader(log, run_id)
    trained = {entry.step: entry.time_ns for entry in reader.entries() if entry.kind == "step"}
    admitted = {read.payload.group: read.payload.created_ns for read in reader.prompts() if read.payload is not None}
    assert sorted(admitted) == list(range(6))
    ahead = [group for group in range(1, 6) if admitted[group] < trained[group - 1]]  # whose commit is followed by the group's version
    assert ahead == [1, 2]  # before there was a step
