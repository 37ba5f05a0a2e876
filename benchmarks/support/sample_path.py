"""Files that a sample passes from its prompt's admission to its optimizer step, observed in a small run through a real broker.

A file counts if one of its functions is called with the sample in its arguments: a record of `prompts`, `rollouts` or `groups`, a prompt,
a request, a completion, a group, or the arrays and tensors made of them. Rules take integers and reward functions take text, so the
files of `ALWAYS` count if they are called at all. Publishing of weights does not count: the path ends at the last optimizer step.
"""

import contextlib
import importlib
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from benchmarks.support.command import ROOT

FOLDERS = ("topics", "infra", "pipeline", "workers")
CARRIERS = frozenset((
    "Prompt", "Rollout", "ScoredSample", "Group", "GroupRequest", "Completion", "GroupInFlight", "TokenSequence", "TokenBatch", "ndarray",
    "Tensor",
))  # fmt: skip
"""Names of the types that hold a sample or a part of it."""
TOPICS = (".prompts", ".rollouts", ".groups")
ALWAYS = ("pipeline/scheduling/", "pipeline/data/", "pipeline/rewards/", "pipeline/agents/", "infra/sandbox/")
IN_A_CHILD = {"infra/sandbox/child.py": "main", "pipeline/rewards/builtin/__init__.py": "the reward function, or the user's own"}
"""Files that run in the child process of reward functions, which is not traced."""
AS_BYTES = ("topics/", "infra/kafka/")
"""Folders in which a sample is bytes: any bytes in the arguments count."""
OTHER_RECORDS = (
    "topics/catalogue", "topics/dead_letters", "topics/ledger", "topics/metrics", "topics/runs", "topics/weight",
    "topics/versions",
    "pipeline/scheduling/resume_point",
)  # fmt: skip
"""Files of other records; `resume_point` is a part of a ledger entry."""
WEIGHTS = ("infra/tensors/", "infra/checkpoints", "pipeline/runtime/weights/")
"""Files of weights, which are tensors too."""
LAST = ("workers/trainer/worker.py", "Trainer.end")
"""Called after the last step; later calls shut down the workers."""
ROLES = ("feeder", "rollout", "scorer", "trainer")
LIMIT_S = 400.0


class Trace:
    """Collects the files in order of their first call with a sample; installed as the profile function of every thread."""

    def __init__(self) -> None:
        self.files: dict[str, str] = {}
        """File, relative to the repository -> the function of its first such call."""
        self._of_code: dict[CodeType, str | None] = {}
        self._started = False
        """True after the first prompt; earlier calls start the workers."""
        self._over = False

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        """Record the file of a call if it is a product file and carries a sample."""
        if event != "call" or self._over:
            return
        code = frame.f_code
        if code not in self._of_code:
            self._of_code[code] = self._file(code)
        file = self._of_code[code]
        self._over = self._over or (file, code.co_qualname) == LAST
        if file is None or file in self.files or self._over:
            return
        arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        values = [frame.f_locals.get(name) for name in arguments]
        with_sample = any(map(carries, values)) or (
            file.startswith(AS_BYTES) and any(isinstance(value, bytes | bytearray | memoryview) for value in values)
        )
        self._started = self._started or (with_sample and file.endswith("/prompts.py"))
        if self._started and code.co_name != "<module>" and (with_sample or file.startswith(ALWAYS)):
            self.files[file] = code.co_qualname

    @staticmethod
    def _file(code: CodeType) -> str | None:
        path = Path(code.co_filename)
        if not path.is_absolute() or not path.resolve().is_relative_to(ROOT):
            return None
        file = path.resolve().relative_to(ROOT).as_posix()
        return file if file.startswith(FOLDERS) and not file.startswith((*WEIGHTS, *OTHER_RECORDS)) else None


def carries(value: Any, *, depth: int = 2) -> bool:
    """True if a value is, or directly contains, a sample or a part of one."""
    name = type(value).__name__
    if name in CARRIERS:
        return True
    if name in ("Record", "Outgoing"):
        return str(getattr(value, "topic", "")).endswith(TOPICS)  # the client has a Record too
    if depth and isinstance(value, list | tuple | Mapping):
        # Another thread may change it: an error here would be raised in the followed code.
        with contextlib.suppress(RuntimeError):
            first = next(iter(value.values() if isinstance(value, Mapping) else value), None)
            return first is not None and carries(first, depth=depth - 1)
    return False


def observe(bootstrap: str, *, steps: int = 1) -> dict[str, str]:
    """File -> function of its first call with a sample, in the order of those calls, over a run of a few steps."""
    from penstock.infra.kafka.log import KafkaLog
    from penstock.pipeline.data.tiny.model import make_tiny_model
    from penstock.pipeline.launch.create import create
    from penstock.pipeline.runtime.roles import ROLES as MODULES
    from penstock.pipeline.runtime.session import join
    from tests.support.worker_set import config_of

    trace, stop, failures, run = Trace(), threading.Event(), list[BaseException](), f"path{time.time_ns()}"

    def work(role: str) -> None:
        log = KafkaLog(bootstrap, client_id=role)
        try:
            session = join(run=run, role=role, log=log, worker=role, model=None, stop=stop)
            if session is not None:
                importlib.import_module(MODULES[role].module).main(session)
        except BaseException as error:
            failures.append(error)
            stop.set()
        finally:
            log.close()

    with tempfile.TemporaryDirectory() as folder:
        make_tiny_model(Path(folder) / "model")
        log = KafkaLog(bootstrap, client_id="path")
        config = config_of(Path(folder) / "model", Path(folder), run={"steps": steps, "seed": 7}, rollout={"workers": 1})
        create(config, log=log, run_id=run, notify=lambda _: None)
        log.close()
        for module in ("torch", "transformers", *(MODULES[role].module for role in ROLES)):
            importlib.import_module(module)  # under a profile function imports take minutes
        threading.setprofile(trace)
        try:
            threads = [threading.Thread(target=work, args=(role,), name=role, daemon=True) for role in ROLES]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(LIMIT_S)
                if thread.is_alive():
                    stop.set()
                    raise TimeoutError(f"the {thread.name} of run {run} has not ended after {LIMIT_S:g} s")
        finally:
            threading.setprofile(None)  # type: ignore[arg-type]  # None takes it away
    if failures:
        raise failures[0]
    return trace.files | IN_A_CHILD
