"""What a re-scoring prints: details first, then the summary, with the functions that were edited since the run was created."""

from typing import Any

from penstock.pipeline.replay.rescore import as_page

CHANGE = {"samples": 8, "changed": 2, "mean_before": 0.5, "mean_after": 0.25}


def described(digest: str) -> dict[str, Any]:
    return {"functions": ["/home/me/rew.py:number"], "weights": [1.0], "sources": {"/home/me/rew.py:number": digest}}


def report(*, now: str) -> dict[str, Any]:
    lists: dict[str, Any] = {name: [] for name in ("changed_outcomes", "flips", "prompts", "broken", "gone")}
    return {
        "run": "r",
        "reward": {"before": described("a" * 64), "after": described(now)},
        "scored": 2,
        "groups": 3,
        "threshold": 0.5,
        "flips_up": 0,
        "flips_down": 0,
        "outcomes": {"scored -> scored": 2},
        "components": {},
        "newly_scored": {"samples": 0, "mean_after": None},
        "written": None,
        **CHANGE,
        **lists,
        "not_scored": [{"group": 2, "before": None, "why": "it was abandoned"}],
    }


def test_a_reward_that_was_edited_under_the_same_name_is_told_apart_by_its_digest() -> None:
    page = as_page(report(now="b" * 64))
    assert "before  /home/me/rew.py:number (aaaaaaaa) x 1\n" in page
    assert "after   /home/me/rew.py:number (bbbbbbbb) x 1; the source was edited after the run was created\n" in page
    unchanged = as_page(report(now="a" * 64))
    assert "edited" not in unchanged and "(aaaaaaaa)" not in unchanged


def test_the_summary_stands_below_the_details() -> None:
    lines = as_page(report(now="a" * 64)).splitlines()
    assert lines[0] == "not scored"
    assert lines[-3:] == [
        "rewards   2 of 8 changed (25.0%); mean 0.5 -> 0.25",
        "groups    2 scored -> scored",
        "flips     0 samples cross 0.5: 0 up, 0 down",
    ]
