"""Trainer backend on DeepSpeed, ZeRO stages 0-3.

The caller, not DeepSpeed, ends a step (`managed_gradient_accumulation` is off). `step` divides the float32 gradient partitions by the
step's denominator through the hook that undoes a loss scale.
"""

import contextlib
import json
import pickle
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pydantic
import torch

from penstock.infra.backends.arithmetic import choose_device
from penstock.infra.backends.base import LossFunction, StepResult, TokenBatch
from penstock.infra.backends.deepspeed import options, shards
from penstock.infra.backends.ranks.process_set import import_deepspeed, join_process_group
from penstock.infra.backends.torch_backend import LocalModel, checked_denominator, checked_norm, saving, strict_or_error
from penstock.infra.errors import BackendError
from penstock.infra.tensors.stream import TensorBytes
from penstock.infra.tensors.torch_copy import fitting, from_bytes, tensor_bytes

TAG = "deepspeed"


class DeepSpeedBackend(LocalModel):
    """AdamW under ZeRO (arXiv 1910.02054): optimizer state (1), gradients (2) and parameters (3) sharded over the processes."""

    name = "deepspeed"
    divides_late = True
    saves_in_background = False  # backward passes move its parameters and gradients between processes

    def __init__(
        self, *, zero_stage: int = 2, offload: str = "none", deepspeed_config: Mapping[str, Any] | None = None, **settings: Any
    ) -> None:
        """Open the model; `settings` are the fields of `BackendSettings`."""
        if zero_stage not in (0, 1, 2, 3):
            raise ValueError(f"zero_stage must be 0, 1, 2 or 3, not {zero_stage}")
        self.zero_stage, self.offload = zero_stage, offload
        self.options = options.passed_on(deepspeed_config or {})
        self.sharded = zero_stage == 3
        self.head_is_whole = not self.sharded
        self.deepspeed = import_deepspeed(choose_device(settings.get("device", "auto")))
        super().__init__(**settings)
        self.world_size = join_process_group(self.deepspeed, self.device)
        optimizer = self.adamw(self.parameter_groups())
        with self._refusals():
            engine, self.optimizer, _, _ = self.deepspeed.initialize(model=self.model, optimizer=optimizer, config=self._config())
        self.module = self.engine = engine
        self.model.train(self.settings.gradient_checkpointing)
        if zero_stage == 0:
            optimizer.register_step_pre_hook(lambda *_: self._divide_and_clip())
        self.denominator = 1.0
        self.norm = 0.0
        self.has_gradient = False

    @strict_or_error()
    def backward(self, batch: TokenBatch, loss_fn: LossFunction, *, denominator: float | None = None) -> dict[str, float]:
        outputs, counts = self.run_forward(batch)
        loss, stats = self.loss_of(outputs, loss_fn)
        self.engine.backward(loss)
        self.has_gradient = True
        return {"loss_sum": float(loss.detach()), **counts, **stats}

    def step(self, *, denominator: float) -> StepResult:
        if not self.has_gradient:
            raise BackendError("an optimizer step needs at least one backward pass before it")
        # DeepSpeed averages over the processes. Scaling the loss instead would change the rounding of the backward pass.
        self.denominator = checked_denominator(denominator) / self.world_size
        rate = self.settings.learning_rate(self.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        if self.zero_stage:
            self.optimizer.override_loss_scale(self.denominator)
        try:
            self.engine.step()
        finally:
            if self.zero_stage:
                self.optimizer.override_loss_scale(1.0)
        self.has_gradient = False
        if self.zero_stage:
            self.norm = checked_norm(float(self.engine.get_global_grad_norm()), step=self.steps)
        self.steps += 1
        return StepResult(grad_norm=self.norm, lr=rate, measures={**self.peak_memory(), **self.taken_flops()})

    def weights(self) -> list[TensorBytes]:
        """A copy of the full weights; under ZeRO-3 a collective that every process must enter, one parameter at a time."""
        if self.adapters is not None:
            return super().weights()
        tensors = []
        for name, parameter in self.model.named_parameters():
            with self._whole(parameter):
                tensors.append(tensor_bytes(name, parameter))
        return tensors

    @torch.no_grad()
    def load_weights(self, tensors: Iterable[TensorBytes]) -> None:
        """Replace all parameters and their float32 masters, or none on an error."""
        if self.adapters is not None:
            super().load_weights(tensors)
            if self.zero_stage:
                self.optimizer.refresh_fp32_params()
            return
        parameters = dict(self.model.named_parameters())
        shapes = {name: tuple(getattr(parameter, "ds_shape", parameter.shape)) for name, parameter in parameters.items()}
        new_weights = fitting(tensors, shapes=shapes)
        for name, parameter in parameters.items():
            with self._whole(parameter, writer=0):
                parameter.copy_(from_bytes(new_weights[name]))
        if self.zero_stage:
            self.optimizer.refresh_fp32_params()

    def save(self, directory: str | Path) -> None:
        """Write DeepSpeed's checkpoint of weights, optimizer and random state, one shard per process."""
        target = Path(directory)
        target.mkdir(parents=True, exist_ok=True)
        with saving(target):
            self.engine.save_checkpoint(str(target), tag=TAG, client_state={"steps": self.steps, "random": self.random_state()})

    def load(self, directory: str | Path) -> None:
        """Restore exactly the state, written by any number of processes. Raises `BackendError` if it is missing or of another model."""
        try:
            state = shards.load(self.engine, Path(directory) / TAG) if self.zero_stage else self._load_whole(directory)
        except (OSError, RuntimeError, EOFError, KeyError, AssertionError, pickle.UnpicklingError) as error:
            raise BackendError(f"cannot read the trainer's state in {directory}: {(str(error) or repr(error)).splitlines()[0]}") from error
        self.set_random_state(state["random"])
        self.steps, self.has_gradient = state["steps"], False

    def fingerprint(self) -> dict[str, str | int]:
        """The common fingerprint, with DeepSpeed's version, ZeRO stage, offload and user options."""
        return super().fingerprint() | {
            "deepspeed": self.deepspeed.__version__,
            "zero_stage": self.zero_stage,
            **({} if self.offload == "none" else {"offload": self.offload}),
            **({"deepspeed_config": json.dumps(self.options, sort_keys=True)} if self.options else {}),
        }

    def close(self) -> None:
        """Free DeepSpeed's buffers and hooks; the process group stays until the process ends."""
        self.engine.destroy()
        self.engine = self.optimizer = None
        super().close()

    def _config(self) -> dict[str, Any]:
        clip = self.settings.max_grad_norm if self.zero_stage else 0.0  # stage 0 clips in `_divide_and_clip`
        host = {"device": "cpu", "pin_memory": self.device.type == "cuda"}
        offloaded = {"offload_optimizer": host} if self.offload != "none" else {}
        if self.offload == "parameters":
            offloaded["offload_param"] = host
        ours = {
            "train_micro_batch_size_per_gpu": 1,  # counts calls, because the engine has no data loader
            "gradient_accumulation_steps": 1,
            "managed_gradient_accumulation": False,
            "gradient_clipping": clip,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": {"stage": self.zero_stage, "overlap_comm": False, **offloaded},
            "bf16": {"enabled": self.settings.dtype == "bfloat16"},
            "data_types": {"grad_accum_dtype": "fp32"},
            "communication_data_type": "fp32",  # else gradients are reduced in bfloat16
            "steps_per_print": 10**9,
        }
        return options.merged(ours, self.options)

    @contextlib.contextmanager
    def _refusals(self) -> Iterator[None]:
        """Raise `BackendError` if DeepSpeed rejects the user's options; without options its error is a bug and passes unchanged."""
        try:
            yield
        # DeepSpeed validates options in many ways and raises any type of error.
        except Exception as error:
            if not self.options:
                raise
            reason = " ".join(str(error).split())[:300]
            if isinstance(error, pydantic.ValidationError):
                first = error.errors(include_url=False)[0]
                reason = f"{'.'.join(map(str, first['loc']))} = {first['input']!r}: {first['msg']}"
            raise BackendError(f"trainer.deepspeed_config: DeepSpeed rejects it: {reason}") from error

    def _load_whole(self, directory: str | Path) -> Mapping[str, Any]:
        """Load the state of stage 0, which every process holds in full; the optimizer keeps the settings of the current run."""
        settings = [{name: value for name, value in group.items() if name != "params"} for group in self.optimizer.param_groups]
        shards.check(Path(directory) / TAG)
        path, state = self.engine.load_checkpoint(str(directory), tag=TAG)
        if path is None:
            raise BackendError(f"there is no trainer state in {directory}")
        for group, current in zip(self.optimizer.param_groups, settings, strict=True):
            group.update(current)
        return dict(state)

    def _whole(self, parameter: torch.nn.Parameter, *, writer: int | None = None) -> Any:
        if self.zero_stage < 3:
            return contextlib.nullcontext()
        return self.deepspeed.zero.GatheredParameters([parameter], modifier_rank=writer)

    @torch.no_grad()
    def _divide_and_clip(self) -> None:
        """Divide and clip under stage 0, which runs the plain optimizer: called between DeepSpeed's averaging and AdamW's update."""
        parameters = [parameter for parameter in self._trained() if parameter.grad is not None]
        gradients = [parameter.grad for parameter in parameters]
        torch._foreach_div_(gradients, self.denominator)
        total = torch.nn.utils.get_total_norm(gradients)
        self.norm = checked_norm(float(total), step=self.steps)
        if self.settings.max_grad_norm:
            torch.nn.utils.clip_grads_with_norm_(parameters, self.settings.max_grad_norm, total)

    def _trained(self) -> Iterator[torch.nn.Parameter]:
        return (parameter for parameter in self.model.parameters() if parameter.requires_grad)
