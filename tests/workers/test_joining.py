"""Workers come in any order and at any time; the result does not change and nothing is lost."""

from pathlib import Path

from crew import Crew, complete, config_of

from pipeline.runs import create


def test_the_worst_order_and_a_joiner_half_way_give_the_same_report_and_weights(broker, run_id, tiny_model, tmp_path: Path):
    config = config_of(tiny_model, tmp_path, run={"steps": 8, "seed": 7}, scorer={"workers": 2})
    plain = complete(broker, f"{run_id}-plain", config)
    with Crew(broker, f"{run_id}-odd") as crew:
        crew.start("trainer")  # the run does not exist yet
        crew.start("scorer", 0)
        crew.start("rollout", 0)
        create(config, log=crew.log, run_id=f"{run_id}-odd", say=lambda _: None)
        crew.start("scorer", 1)
        crew.start("feeder")
        crew.wait(lambda: crew.report()["steps"] >= 3)
        crew.start("rollout", 1)
        crew.wait(lambda: crew.report()["steps"] >= 5)
        crew.stop("rollout-0")  # and the first one leaves
        crew.wait()
        odd = crew.report()
    assert odd["weights"]["digest"] == plain["weights"]["digest"]
    for name in ("groups", "reward", "steps", "versions", "tokens", "dead_letters"):
        assert odd[name] == plain[name], name
    assert odd["groups"]["admitted"] == odd["groups"]["trained"] + odd["groups"]["filtered"]
