"""Low-rank adapters (LoRA, arXiv 2106.09685) on every linear layer of a model but its output, by `peft`.

The rule: whoever reads the weights gets merged ones, `W + alpha / rank * B A` in float32 and rounded once, under the names that the
model has without adapters; only the adapters are trained, and they are float32.
"""

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from penstock.infra.errors import BackendError
from penstock.infra.tensors.stream import TensorBytes
from penstock.infra.tensors.torch_copy import fitting, from_bytes

NAME = "default"
FOLDER = "adapter"
"""Where an export has the adapters, as `peft` and vLLM read them."""


class Adapters:
    """A model's adapters; B begins at zero, so that the model begins as it is without them."""

    def __init__(self, model: Any, *, rank: int, alpha: float, seed: int) -> None:
        """Freeze the model and put adapters into it; `A` is drawn from the seed. Raises `BackendError`."""
        try:
            from peft import LoraConfig, inject_adapter_in_model
            from peft.tuners.lora import LoraLayer
        except ModuleNotFoundError as error:
            raise BackendError(f"trainer.lora_rank needs the package {error.name}; install penstock[trainer]") from error
        self.model = model
        self.config = LoraConfig(r=rank, lora_alpha=alpha, target_modules="all-linear", lora_dropout=0.0, task_type="CAUSAL_LM")
        torch.manual_seed(seed)
        model.requires_grad_(False)
        try:
            inject_adapter_in_model(self.config, model, adapter_name=NAME)
        except ValueError as error:
            raise BackendError(f"trainer.lora_rank: this model cannot take adapters ({str(error).splitlines()[0]})") from error
        self.layers = {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
        for layer in self.layers.values():
            for part in (layer.lora_A[NAME], layer.lora_B[NAME]):
                part.to(torch.float32)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The merged weights, each under its name in the plain model; merged ones are copies."""
        for name, parameter in self.model.named_parameters():
            owner, _, _ = name.rpartition(".base_layer.")
            if owner and name.endswith(".weight"):
                yield f"{owner}.weight", self._merged(self.layers[owner])
            elif owner:
                yield name.replace(".base_layer.", "."), parameter
            elif ".lora_" not in name:
                yield name, parameter

    @torch.no_grad()
    def load(self, tensors: Iterable[TensorBytes]) -> None:
        """Replace the weights below the adapters, or none, and set the adapters to add nothing."""
        plain = {name.replace(".base_layer.", "."): parameter for name, parameter in self.model.named_parameters() if ".lora_" not in name}
        given = fitting(tensors, shapes={name: tuple(parameter.shape) for name, parameter in plain.items()})
        for name, parameter in plain.items():
            parameter.copy_(from_bytes(given[name]))
        for layer in self.layers.values():
            layer.lora_B[NAME].weight.zero_()

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Within it the model is the one below the adapters."""
        self._enable(False)
        try:
            yield
        finally:
            self._enable(True)

    def save(self, directory: Path, *, base: str) -> None:
        """Write the adapters as `peft` and vLLM read them; `base` is the model below them."""
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

    @torch.no_grad()
    def _merged(self, layer: Any) -> torch.Tensor:
        """[out, in] in the dtype of the weight."""
        weight, a, b = layer.get_base_layer().weight, layer.lora_A[NAME].weight, layer.lora_B[NAME].weight
        merged: torch.Tensor = torch.addmm(weight.float(), b, a, alpha=layer.scaling[NAME]).to(weight.dtype)
        return merged

    def _enable(self, enabled: bool) -> None:
        for layer in self.layers.values():
            layer.enable_adapters(enabled)
