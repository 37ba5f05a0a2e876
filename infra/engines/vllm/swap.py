"""Puts one version into a running engine by vLLM's own calls: pause, start, update, finish, resume.

The rule: nothing is drawn between the first call and the last, and after an error nobody resumes.
"""

import contextlib
import itertools
import os
from collections.abc import Sequence
from typing import Any

from penstock.infra.tensors.stream import TensorBytes

_numbers = itertools.count()
"""Numbers of hand-overs, shared by all engines of a process."""


def swap(llm: Any, version: int, tensors: Sequence[TensorBytes], *, clear_cache: bool, shared: bool, own_process: bool) -> None:
    """Load `tensors` as `version`; `shared` when the model is in other processes, `own_process` when vLLM's scheduler is, too.

    `clear_cache` has the samples in work compute their keys and values anew. Whatever it raises, the weights may be half loaded.
    """
    from penstock.infra.engines.vllm import transfer

    with contextlib.ExitStack() as undo:
        if shared:
            file = os.memfd_create("penstock-weights")  # it has no name, so it is gone with its last holder, however that ends
            undo.callback(os.close, file)
            info = transfer.write_shared(file, tensors)
        else:
            number = next(_numbers)
            info = transfer.hand_over(number, tensors)
            undo.callback(transfer.taken_back, number)
        core = llm.engine_core.call_utility if own_process else _here(llm)
        core("pause_scheduler", "keep", clear_cache)
        llm.collective_rpc("load_version", args=(info,))
        llm.set_weight_version(str(version))
        core("resume_scheduler")


def _here(llm: Any) -> Any:
    core = llm.engine_core.engine_core
    return lambda method, *arguments: getattr(core, method)(*arguments)
