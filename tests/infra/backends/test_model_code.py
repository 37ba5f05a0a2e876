"""A model directory is data: code in it is not executed, and no library asks whether it may be."""

import ast
import builtins
import contextlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.infra.errors import ConfigError, PenstockError
from tests.support.paths import ROOT

CALLS = ("from_pretrained", "from_config")
CODE = "from pathlib import Path\nfrom transformers import PretrainedConfig\nPath(__file__).with_name('executed').touch()\n"
AUTO_MAP = {"AutoConfig": "evil.Own", "AutoModelForCausalLM": "evil.Own", "AutoTokenizer": ["evil.Own", "evil.Own"]}


def calls_without_refusal(source: str) -> list[str]:
    """Calls of transformers that load a model's files and do not refuse its code."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    loading = [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr in CALLS]
    return [ast.unparse(call) for call in loading if "trust_remote_code=False" not in ast.unparse(call)]


def test_every_call_that_loads_a_model_refuses_its_code() -> None:
    files = [file for folder in ("pipeline", "infra", "workers") for file in (ROOT / folder).rglob("*.py")]
    sources = {str(file.relative_to(ROOT)): source for file in files if any(name in (source := file.read_text()) for name in CALLS)}
    assert {name: calls for name, source in sources.items() if (calls := calls_without_refusal(source))} == {}
    assert "infra/engines/transformers/engine.py" in sources
    assert calls_without_refusal("hf.AutoConfig.from_pretrained(path, trust_remote_code=True)")


def load_tokenizer(folder: Path) -> None:
    from penstock.pipeline.data.model_files import _full_tokenizer

    _full_tokenizer(folder)


def load_for_generation(folder: Path) -> None:
    from penstock.infra.engines.transformers.engine import load_model

    load_model(folder)


def load_for_training(folder: Path) -> None:
    import torch

    from penstock.infra.backends.model import open_model
    from penstock.infra.backends.settings import BackendSettings

    open_model(BackendSettings(model_path=str(folder), lr=0.1), device=torch.device("cpu"))


def write_model(folder: Path) -> None:
    from penstock.infra.backends.model import write_model
    from penstock.infra.tensors.stream import TensorBytes

    write_model(folder, [TensorBytes(name="w", dtype="float32", shape=(1,), data=bytes(4))], folder / "out")


@pytest.mark.costly
@pytest.mark.parametrize("load", [load_tokenizer, load_for_generation, load_for_training, write_model])
def test_code_of_a_model_is_not_executed_whatever_a_terminal_answers(
    load: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "evil.py").write_text(CODE + "class Own(PretrainedConfig):\n    model_type = 'own'\n")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": AUTO_MAP}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Own", "auto_map": AUTO_MAP}))
    questions: list[object] = []
    monkeypatch.setattr(builtins, "input", lambda *text: questions.append(text) or "y")
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "cache"))
    with contextlib.suppress(PenstockError, ConfigError):  # a tokenizer is loaded without its code, a model is refused
        load(tmp_path)
    assert not questions
    assert not list(tmp_path.rglob("executed"))
