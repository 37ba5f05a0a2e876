"""What is committed is never lost: a trainer that comes back repeats the recorded steps bit for bit, and a stopped run goes on."""

from pathlib import Path

from crew import Crew, complete, config_of

from pipeline.runs import create


def test_a_trainer_that_is_replaced_repeats_the_recorded_steps_and_ends_in_the_same_weights(broker, run_id, tiny_model, tmp_path: Path):
    config = config_of(
        tiny_model, tmp_path, run={"steps": 6, "seed": 7}, schedule={"prompts_per_step": 4, "samples_per_prompt": 4, "steps_per_version": 2}
    )
    plain = complete(broker, f"{run_id}-plain", config)
    with Crew(broker, f"{run_id}-again") as crew:
        create(config, log=crew.log, run_id=crew.run, say=lambda _: None)
        for role in ("trainer", "rollout", "scorer", "feeder"):
            crew.start(role)
        crew.wait(lambda: crew.report()["steps"] >= 3)
        crew.stop("trainer")
        assert crew.report()["status"] != "finished"
        crew.start("trainer")
        crew.wait()
        again = crew.report()
    assert again["weights"]["digest"] == plain["weights"]["digest"]
    assert again["steps"] == plain["steps"] == 6
    assert again["groups"] == plain["groups"]


def test_a_feeder_and_a_scorer_that_are_replaced_go_on_where_the_log_ends(broker, run_id, tiny_model, tmp_path: Path):
    config = config_of(tiny_model, tmp_path, run={"steps": 6, "seed": 7})
    plain = complete(broker, f"{run_id}-plain", config)
    with Crew(broker, f"{run_id}-again") as crew:
        create(config, log=crew.log, run_id=crew.run, say=lambda _: None)
        for role in ("trainer", "rollout", "scorer", "feeder"):
            crew.start(role)
        crew.wait(lambda: crew.report()["steps"] >= 2)
        crew.stop("feeder")
        crew.stop("scorer-0")
        crew.start("scorer", 1)
        crew.start("feeder")
        crew.wait()
        again = crew.report()
    assert again["weights"]["digest"] == plain["weights"]["digest"]
    assert again["groups"] == plain["groups"]
