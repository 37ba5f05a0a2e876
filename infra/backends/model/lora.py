"""Low-rank adapters (LoRA, arXiv 2106.09685) on every linear layer of a model but its output, by `peft`.

The rule: whoever reads the weights gets merged ones, `W + alpha / rank * B A` as `topics.versions` makes them, under the names that
the model has without adapters; only the adapters are trained, and they are float32.
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
"""Where an export has the adapters, as `peft` and vLLM read them."""


class Adapters:
    """A model's adapters; B begins at zero, so that the model begins as it is without them."""

    def __init__(self, model: Any, *, rank: int, alpha: float, seed: int) -> None:
        """Freeze the model and put adapters into it; `A` is drawn from the seed. Raises `BackendError`."""
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
        """The model's weights at this moment: a copy of the adapters, and the weights below them where they are."""
        adapters = {
            f"{name}.weight": Adapter(a=_floats(layer.lora_A), b=_floats(layer.lora_B), scale=layer.scaling[NAME])
            for name, layer in self.layers.items()
        }
        return Adapted(below=self._seen_below, below_digest=self._digest_below, adapters=adapters)

    @torch.no_grad()
    def load(self, tensors: Iterable[TensorBytes]) -> None:
        """Replace the weights below the adapters, or none, and set the adapters to add nothing."""
        plain = dict(self._below())
        given = fitting(tensors, shapes={name: tuple(parameter.shape) for name, parameter in plain.items()})
        for name, parameter in plain.items():
            parameter.copy_(from_bytes(given[name]))
        for layer in self.layers.values():
            layer.lora_B[NAME].weight.zero_()
        self._digests_below = {}

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

    def _below(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights below the adapters, each under its name in the plain model."""
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
    """A copy of A or B."""
    copied: npt.NDArray[np.float32] = part[NAME].weight.detach().to("cpu", torch.float32, copy=True).numpy()
    return copied
