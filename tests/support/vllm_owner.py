"""A process that owns an engine in a process of its own, swaps weights in flight, writes what it drew, and then does what it is told.

python vllm_owner.py MODEL OUT wait|kill-engine|end [SETTINGS]

SETTINGS is JSON: `engine`, arguments of the engine; `request`, of each request; `groups`, how many; `every`, steps between two swaps;
`sleeps`, whether the engine sleeps before it draws.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

from penstock.infra.errors import EngineError
from tests.support.vllm_helpers import draw_with_swaps, open_engine, request, tensors_of, version_values


def main() -> None:
    """Draw, write, and end; or wait to be killed; or kill the engine's process and write what the engine says."""
    directory, out, then = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    chosen = json.loads(sys.argv[4]) if len(sys.argv) > 4 else {}
    engine = open_engine(directory, **({"engine_process": True} | chosen.get("engine", {})))
    asked = [request(group, **({"tokens": 40} | chosen.get("request", {}))) for group in range(chosen.get("groups", 4))]
    if chosen.get("sleeps"):
        engine.sleep()
        engine.wake()
        engine.load_weights(0, tensors_of(version_values(directory)(0)))
    found, swaps = draw_with_swaps(engine, asked, version_values(directory), every=chosen.get("every", 12))
    drawn = [
        {"group": one.group, "sample": one.sample, "ids": one.token_ids.tolist(), "logprobs": one.logprobs.tolist(), "spans": one.spans}
        for one in found
    ]
    report = {"swaps": swaps, "drawn": drawn, "scratch": str(engine._scratch), "stats": engine.stats()}
    if then == "end":
        engine.close()
        _write(out, report)
        return
    for group in range(10, 14):
        engine.submit(request(group, tokens=200))
    engine.step()
    _write(out, report)
    if then == "wait":
        time.sleep(600)
    for process in engine._llm.engine_core.resources.engine_manager.processes:
        os.kill(process.pid, signal.SIGKILL)
    began = time.monotonic()
    try:
        while time.monotonic() - began < 60:
            engine.step()
        words = "it went on"
    except EngineError as error:
        words = str(error)
    engine.close()
    _write(out.with_suffix(".death"), {"words": words, "after_s": time.monotonic() - began})


def _write(path: Path, value: object) -> None:
    aside = path.with_suffix(".part")
    aside.write_text(json.dumps(value), encoding="utf-8")
    aside.rename(path)


if __name__ == "__main__":
    main()
