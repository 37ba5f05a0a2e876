"""Figures of a run's environments, from the workers that ran them."""

from typing import Any

from penstock.pipeline.inspect.run_view import RunView
from penstock.pipeline.runtime.roles import generating_roles

_PREFIX = "engine_environment_"


def episodes(view: RunView) -> dict[str, Any] | None:
    """Trajectories, their turns, the environments' seconds, failures by class; None if no worker has run one.

    `turns_mean` and `environment_s_mean` are per trajectory, `segments_mean` is the number of sequences that one is trained in. `losses`
    were recovered, `results_cut` were longer than `environment.max_result_tokens`. `engine_idle_s`: time in which the engines had no
    turn to generate, since every trajectory waited for its environment.
    """
    workers = [worker for worker in view.workers.values() if worker.role in generating_roles()]
    engines = [worker for worker in workers if worker.role == "rollout"]

    def total(name: str) -> float:
        return sum(worker.total(f"engine_{name}") for worker in workers)

    count = total("trajectories")
    if not count:
        return None
    kinds = sorted({name for worker in workers for values in worker.incarnations.values() for name in values if name.startswith(_PREFIX)})
    causes = {name.removeprefix(_PREFIX): sum(worker.total(name) for worker in workers) for name in kinds if name != f"{_PREFIX}s"}
    return {
        "trajectories": int(count),
        "turns_mean": total("turns") / count,
        "dropped": int(total("dropped")),
        "dropped_turns_mean": total("dropped_turns") / total("dropped") if total("dropped") else None,
        "segments_mean": total("segments") / count,
        "environment_s": total("environment_s"),
        "environment_s_mean": total("environment_s") / count,
        "engine_idle_s": sum(worker.total("engine_waits_s") for worker in engines),
        "losses": int(total("losses")),
        "results_cut": int(total("results_cut")),
        "broken": int(total("broken")),
        "causes": {name: int(number) for name, number in causes.items() if number},
    }


def episodes_line(figures: dict[str, Any]) -> str:
    """The figures of `episodes` as one line of text."""
    parts = [
        f"{figures['trajectories']:,} of {figures['turns_mean']:.1f} turns",
        f"environments {figures['environment_s']:,.1f} s, engines idle for them {figures['engine_idle_s']:,.1f} s",
    ]
    if figures["segments_mean"] > 1.0:
        parts.append(f"{figures['segments_mean']:.2f} sequences each")
    if figures["results_cut"]:
        parts.append(f"{figures['results_cut']:,} results cut at environment.max_result_tokens")
    if figures["dropped"]:
        parts.append(f"{figures['dropped']:,} dropped after {figures['dropped_turns_mean']:.1f} turns")
    if figures["losses"]:
        parts.append(f"{figures['losses']} losses made good")
    if figures["broken"]:
        kinds = ", ".join(f"{number} {name}" for name, number in figures["causes"].items())
        parts.append(f"{figures['broken']} broken ({kinds})")
    return " · ".join(parts)
