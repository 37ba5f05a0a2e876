"""Low-rank adapters (LoRA, arXiv 2106.09685) on every linear layer of a model except its output, by `peft`.

Only the adapters are trained, in float32. Weights are read merged, `W + alpha / rank * B A` as `topics.versions` computes it, under the
names of the model without adapters.
"""

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file

from penstock.infra.errors import BackendError
from penstock.infra.tensors.adapted import Adapted, Adapter
from penstock.infra.tensors.stream import Hash, TensorBytes, digest
from penstock.infra.tensors.torch_copy import fitting, from_bytes, seen_bytes

NAME = "default"
FOLDER = "adapter"
"""Folder of an export with the adapters, in the format of `peft` and vLLM."""


class Adapters:
    """A model's adapters; B is initialised with zeros, so that the initial model is unchanged."""

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
            raise BackendError(f"trainer.lora_rank: this model cannot take adapters ({str(error).splitlines()[0]})") from error
        self.layers = {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
        for layer in self.layers.values():
            for part in (layer.lora_A[NAME], layer.lora_B[NAME]):
                part.to(torch.float32)
        self._digests_below: dict[Hash, str] = {}

    def apart(self) -> Adapted:
        """The current weights: a copy of the adapters, and their frozen base without a copy."""
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
        for name, parameter in plain.items():
            parameter.copy_(from_bytes(weights[name]))
        for layer in self.layers.values():
            layer.lora_B[NAME].weight.zero_()
        self._digests_below = {}

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Within it the adapters are disabled."""
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
        """The base weights, each under its name in the plain model."""
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
