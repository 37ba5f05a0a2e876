"""The undocumented parts of vLLM that Penstock uses: those of the installed release are there, and a missing one is named."""

from importlib.util import find_spec
from types import SimpleNamespace

import pytest

from penstock.infra.engines.vllm import private
from penstock.infra.errors import EngineError


@pytest.mark.costly
@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
def test_the_installed_vllm_has_every_part() -> None:
    private.check_modules()


def test_all_missing_parts_are_named_with_the_installed_version(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = ("json:loads", "json:JSONDecoder.decode", "json:JSONDecoder.no_method", "no_such_module:anything", "json:no_function")
    monkeypatch.setattr(private, "IN_MODULES", parts)
    monkeypatch.setattr(private, "_version", lambda: "9.9")
    message = r"^vLLM 9\.9 lacks json:JSONDecoder\.no_method, no_such_module, json:no_function, which Penstock uses: "
    with pytest.raises(EngineError, match=message):
        private.check_modules()


@pytest.mark.parametrize(
    ("own_process", "missing"), [(True, "engine_core.call_utility"), (False, "engine_core.engine_core.resume_scheduler")]
)
def test_an_engine_that_lacks_a_part_is_refused(own_process: bool, missing: str) -> None:
    inner = SimpleNamespace(pause_scheduler=None)
    core = SimpleNamespace(shutdown=None, sleep=None, wake_up=None, engine_core=inner, utility_results={})
    core.outputs_queue = SimpleNamespace(not_empty=None, queue=[])
    core.resources = SimpleNamespace(engine_manager=SimpleNamespace(processes=[]))
    engine = SimpleNamespace(
        engine_core=core, logger_manager=None, output_processor=SimpleNamespace(log_stats=False, request_states={}),
        vllm_config=SimpleNamespace(model_config=SimpleNamespace(hf_config=None), parallel_config=SimpleNamespace(world_size=1)),
    )  # fmt: skip
    with pytest.raises(EngineError, match=rf"lacks {missing}, which Penstock uses: "):
        private.check_engine(engine, own_process=own_process)
