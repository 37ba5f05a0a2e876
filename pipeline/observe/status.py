"""Where a run stands at this moment, as plain data for `penstock status --json`.

The rule: a pure function of what the topics say and of the time; a worker that is not heard of is said to be silent, not dead.
"""

import math
from typing import Any

from penstock.pipeline.observe import bottleneck
from penstock.pipeline.observe.live.frame import elapsed_s, to_go_s
from penstock.pipeline.observe.report import summary
from penstock.pipeline.observe.run_view import RunView

WATCHED = ("ledger", "metrics", "groups", "prompts", "dead-letters")
"""What status reads: not the rollouts, which are most of a run's records."""


def silences(view: RunView, *, now_s: float) -> dict[str, float]:
    """Seconds since each worker's last report, for those that have not ended."""
    return {worker.worker: max(0.0, now_s - worker.time_ns / 1e9) for worker in view.workers.values() if not worker.ended}


def standstill_s(view: RunView, *, now_s: float) -> float | None:
    """Seconds for which nothing has moved, None for a run that is over or has moved within its `run.stall_s`."""
    limit_s = float(view.config.get("run", {}).get("stall_s", math.inf))
    still_s = max(0.0, now_s - view.moved_ms / 1000)
    return still_s if still_s >= limit_s and not view.ended and view.status != "created" else None


def standing(view: RunView, *, now_s: float) -> dict[str, Any]:
    """The run's state and each worker's, ready for JSON."""
    fates = list(summary.fates(view).values())
    slowest = bottleneck.find(view)
    silent = silences(view, now_s=now_s)
    last = view.steps[max(view.steps)].metrics if view.steps else {}
    return {
        "run": view.run,
        "status": view.status,
        "reason": view.details.get("reason"),
        "steps_done": len(view.steps),
        "steps": view.info.get("steps"),
        "version": view.version,
        "reward": view.reward,
        "lag_mean": last.get("lag_mean"),
        "elapsed_s": elapsed_s(view, now_s=now_s),
        "to_go_s": to_go_s(view),
        "groups": {name: fates.count(name) for name in sorted(set(fates))},
        "dead_letters": len(view.dead_letters),
        "bottleneck": None if slowest is None else {"who": slowest.who, "why": slowest.why},
        "workers": [
            {
                "worker": worker.worker,
                "role": worker.role,
                "doing": "ended" if worker.ended else worker.labels.get("doing"),
                "error": worker.labels.get("error"),
                "starts": len(worker.incarnations),
                "host": worker.labels.get("host"),
                "pid": worker.labels.get("pid"),
                "silent_s": silent.get(worker.worker),
                "values": worker.values,
            }
            for worker in view.workers.values()
        ],
    }
