"""Trainer backend on plain torch: one process on the CPU or a GPU, or several with a full copy of the model each.

Gradients are summed in float32 for every dtype of the weights, and divided once, in `step`.
"""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from penstock.infra.backends.arithmetic import return_freed_memory
from penstock.infra.backends.base import LossFunction, StepResult
from penstock.infra.backends.batch import TokenBatch
from penstock.infra.backends.common import LocalModel, checked_denominator, checked_norm, saving, strict_or_error, update_norm
from penstock.infra.errors import BackendError
from penstock.infra.tensors.stream import TensorBytes

STATE_FILE = "trainer.pt"
LARGE_MODEL_BYTES = 2**28
"""Size of weights above which freed memory is returned: mapping their gradients again takes little of the step, keeping them costs as
much memory again."""


class TorchBackend(LocalModel):
    """AdamW over float32 masters; for float32 models the masters are the parameters themselves."""

    name = "torch"
    divides_late = True
    saves_in_background = True
    sharded = False

    def __init__(self, **settings: Any) -> None:
        """Open the model; `settings` are the fields of `BackendSettings`."""
        super().__init__(**settings)
        groups = self.parameter_groups()
        self.parameters = [parameter for group in groups for parameter in group["params"]]
        self.masters = self.parameters
        if self.settings.dtype != "float32":
            for group in groups:
                group["params"] = [parameter.detach().float().requires_grad_() for parameter in group["params"]]
            self.masters = [master for group in groups for master in group["params"]]
            for parameter, master in zip(self.parameters, self.masters, strict=True):
                parameter.register_post_accumulate_grad_hook(_moves_gradient_to(master))
        self.optimizer = self.adamw(groups)
        self.has_gradient = False
        self.offloaded: list[torch.Tensor] = []
        self.large = self.device.type == "cpu" and sum(parameter.nbytes for parameter in self.parameters) > LARGE_MODEL_BYTES
        self.rank, self.ranks = 0, 1
        if torch.distributed.is_initialized():
            self.rank, self.ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()

    @strict_or_error()
    def backward(self, batch: TokenBatch, loss_fn: LossFunction, *, denominator: float | None = None) -> dict[str, float]:
        """Add the gradient of `loss_fn`'s sum; `denominator` is not needed here."""
        if self.large and not self.has_gradient:
            return_freed_memory()
        outputs, counts = self.run_forward(batch)
        loss, stats = self.loss_of(outputs, loss_fn)
        loss.backward()
        self.has_gradient = True
        return {"loss_sum": float(loss.detach()), **counts, **stats}

    @torch.no_grad()
    def step(self, *, denominator: float) -> StepResult:
        """Divide the gradient sum, clip, update. Raises `BackendError` and leaves the weights unchanged if the gradient is not finite."""
        if not self.has_gradient:
            raise BackendError("an optimizer step needs at least one backward pass before it")
        self._add_up_ranks()
        masters = [master for master in self.masters if master.grad is not None]
        gradients = [master.grad for master in masters]
        torch._foreach_div_(gradients, checked_denominator(denominator))
        total = torch.nn.utils.get_total_norm(gradients)
        norm = checked_norm(float(total), step=self.steps)
        if self.settings.max_grad_norm:
            torch.nn.utils.clip_grads_with_norm_(masters, self.settings.max_grad_norm, total)
        rate = self.settings.learning_rate(self.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        measures = {"update_norm": update_norm(self.optimizer), **self.peak_memory(), **self.taken_flops()}
        self.optimizer.zero_grad(set_to_none=True)
        self._publish_masters()
        self.steps += 1
        self.has_gradient = False
        return StepResult(grad_norm=norm, lr=rate, measures=measures)

    def weights(self) -> list[TensorBytes]:
        """A copy of all parameters, tied ones once."""
        return self.whole_weights()

    @torch.no_grad()
    def load_weights(self, tensors: Iterable[TensorBytes]) -> None:
        """Replace all parameters, or none on an error."""
        self.replace_weights(tensors)
        if self.masters is not self.parameters:
            torch._foreach_copy_(self.masters, self.parameters)

    def save(self, directory: str | Path) -> None:
        """Write `trainer.pt` on rank 0: masters, AdamW's moments, step count, random state."""
        if self.rank:
            return
        target = Path(directory)
        target.mkdir(parents=True, exist_ok=True)
        state = {
            "masters": [master.detach() for master in self.masters],
            "optimizer": self.optimizer.state_dict(),
            "steps": self.steps,
            "random": self.random_state(),
        }
        with saving(target), (target / STATE_FILE).open("wb") as file:
            torch.save(state, file)

    @torch.no_grad()
    def load(self, directory: str | Path) -> None:
        """Restore exactly the state that `save` wrote. Raises `BackendError` if it is missing or of another model."""
        file = Path(directory) / STATE_FILE
        try:
            state = torch.load(file, map_location=self.device, weights_only=True)
        except (OSError, RuntimeError, EOFError) as error:
            raise BackendError(f"cannot read the trainer's state in {file}: {str(error).splitlines()[0]}") from error
        if [master.shape for master in self.masters] != [saved.shape for saved in state["masters"]]:
            raise BackendError(f"{file} is the state of another model")
        torch._foreach_copy_(self.masters, state["masters"])
        settings_by_group = [{name: value for name, value in group.items() if name != "params"} for group in self.optimizer.param_groups]
        self.optimizer.load_state_dict(state["optimizer"])
        for group, settings in zip(self.optimizer.param_groups, settings_by_group, strict=True):
            group.update(settings)  # keep the settings of the current run
        self.optimizer.zero_grad(set_to_none=True)
        self.set_random_state(state["random"])
        self._publish_masters()
        self.steps, self.has_gradient = state["steps"], False

    def sleep(self) -> None:
        """Move weights, masters, moments and frozen copies to the host, bit for bit; on a CPU nothing is moved."""
        assert not self.has_gradient, "a backend sleeps between two steps"
        self.offloaded = [tensor for tensor in self._state() if tensor.device.type == self.device.type]
        for tensor in self.offloaded:
            tensor.data = tensor.data.cpu()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # else torch keeps the freed memory for this process

    def wake(self) -> None:
        """Move everything back to the device."""
        for tensor in self.offloaded:
            tensor.data = tensor.data.to(self.device)
        self.offloaded = []

    def _state(self) -> Iterator[torch.Tensor]:
        frozen = [policy.model for policy in (self.reference, self.snapshot) if policy is not None]
        for model in (self.model, *frozen):
            yield from model.parameters()
            yield from model.buffers()
        yield from self.masters
        for state in self.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))

    def _add_up_ranks(self) -> None:
        """Add the gradients of all processes, once a step and in float32; all processes get the same bits."""
        if self.ranks == 1:
            return
        for master in self.masters:
            if master.grad is None:
                master.grad = torch.zeros_like(master)
            torch.distributed.all_reduce(master.grad)

    def _publish_masters(self) -> None:
        if self.masters is not self.parameters:
            torch._foreach_copy_(self.parameters, self.masters)


def _moves_gradient_to(master: torch.Tensor) -> Callable[[torch.Tensor], None]:
    """A hook for a low-precision parameter that moves its gradient into the master's float32 sum as soon as it is computed."""

    @torch.no_grad()
    def move(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        if master.grad is None:
            master.grad = parameter.grad.float()
        else:
            master.grad.add_(parameter.grad)
        parameter.grad = None

    return move
