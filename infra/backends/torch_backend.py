"""Trainer backend on plain torch, and the base of all backends: forward passes, frozen policies, fingerprint, export."""

import contextlib
import math
import os
import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers

from penstock.infra.backends.arithmetic import choose_device, fix_arithmetic, return_freed_memory
from penstock.infra.backends.base import LossFunction, StepResult, TokenBatch
from penstock.infra.backends.hardware import FlopCount, peak_flops, this_cpu
from penstock.infra.backends.logprobs.forward import Passed, choose_forward
from penstock.infra.backends.model import FOLDER, Adapters, FrozenPolicy, host_floats, open_model, save_model, saved_on_host
from penstock.infra.backends.settings import BackendSettings
from penstock.infra.backends.value_head import ValueHead
from penstock.infra.errors import BackendError, Diverged
from penstock.infra.tensors.adapted import Adapted
from penstock.infra.tensors.host_memory import HostBuffers
from penstock.infra.tensors.stream import TensorBytes
from penstock.infra.tensors.torch_copy import CopyStream, copy_into, from_bytes


@contextlib.contextmanager
def strict_or_error() -> Iterator[None]:
    """Raise `BackendError` if torch rejects an operation under `trainer.deterministic = "strict"`; also a decorator."""
    try:
        yield
    except RuntimeError as error:
        if "does not have a deterministic implementation" not in str(error):
            raise
        text = str(error).split(", but")[0].splitlines()[0]
        raise BackendError(f"trainer.deterministic = 'strict': {text}. Set trainer.deterministic = 'warn'") from error


class LocalModel:
    """Base of the backends: everything that does not depend on the optimizer; subclasses set `module`, which runs forward."""

    name = "?"
    head_is_whole = True
    """False if the output layer's weight is available only while it runs, so that logits cannot be computed in pieces."""

    def __init__(self, **settings: Any) -> None:
        self.settings = BackendSettings(**settings)
        fix_arithmetic(self.settings)
        self.device = choose_device(self.settings.device)
        self.copies = CopyStream(self.device, HostBuffers(shared=self.settings.share_weights))
        self.model = open_model(self.settings, device=self.device)
        self.model.eval()
        s = self.settings
        self.adapters = Adapters(self.model, rank=s.lora_rank, alpha=s.alpha, seed=s.seed) if s.lora_rank else None
        if s.gradient_checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
            self.model.train()  # checkpointing is skipped in eval mode; there is no dropout left to switch on
        self.forward = choose_forward(
            self.model, share=s.share_prompts, device=self.device, in_pieces=self.head_is_whole, compile_layers=s.compile
        )
        self.shares_prompts = self.forward.shared
        self.value = ValueHead.of(self.model, s, device=self.device, in_pieces=self.forward.in_pieces)
        self.module: Any = self.model
        reference = self.settings.reference_path
        own_reference = self.settings.reference and (self.adapters is None or reference is not None)
        self.reference = FrozenPolicy(self.settings, device=self.device, path=reference) if own_reference else None
        self.snapshot = FrozenPolicy(self.settings, device=self.device) if self.settings.snapshot else None
        self.flop_count, self.flops = FlopCount.of_model(self.model), 0.0
        self.steps, self.has_gradient = 0, False

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Return the parameter groups for AdamW: weight decay on matrices, none on norms and biases."""
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        if not self.settings.weight_decay:
            return [{"params": parameters}]
        matrices = [parameter for parameter in parameters if parameter.ndim >= 2]
        vectors = [parameter for parameter in parameters if parameter.ndim < 2]
        groups: list[dict[str, Any]] = [{"params": matrices, "weight_decay": self.settings.weight_decay}, {"params": vectors}]
        return [group for group in groups if group["params"]]

    def adamw(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """Return AdamW (arXiv 1711.05101) for these groups, with all parameters in one fused kernel."""
        s = self.settings
        return torch.optim.AdamW(groups, lr=s.lr, betas=s.betas, eps=s.eps, weight_decay=0.0, fused=True)

    @torch.no_grad()
    def divide_and_clip(self, parameters: Iterable[torch.Tensor], denominator: float) -> float:
        """Divide the gradients and clip their norm; return the norm before clipping. Raises `Diverged` unless it is finite."""
        trained = [parameter for parameter in parameters if parameter.grad is not None]
        gradients = [parameter.grad for parameter in trained]
        torch._foreach_div_(gradients, denominator)
        total = torch.nn.utils.get_total_norm(gradients)
        norm = checked_norm(float(total), step=self.steps)
        if self.settings.max_grad_norm:
            torch.nn.utils.clip_grads_with_norm_(trained, self.settings.max_grad_norm, total)
        return norm

    def run_forward(self, batch: TokenBatch) -> tuple[Passed, dict[str, float]]:
        """Run the forward pass with gradient; return its result and counts: `tokens`, `computed_tokens`, perhaps `entropy_sum`."""
        s = self.settings
        with saved_on_host(self.model, device=self.device) if s.offload_activations else contextlib.nullcontext():
            passed = self.forward(self.module, batch, device=self.device, entropy=s.entropy or s.entropy_bonus, value=self.value)
        counts = {"tokens": float(batch.tokens), "computed_tokens": float(passed.computed)}
        self.flops += self.flop_count.of(batch.attention_mask.sum(1).tolist(), computed=passed.computed)
        return passed, counts | ({} if passed.entropies is None else {"entropy_sum": float(passed.entropies.detach().sum())})

    @strict_or_error()
    def backward(self, batch: TokenBatch, loss_fn: LossFunction, *, denominator: float | None = None) -> dict[str, float]:
        """Add the gradient of a micro-batch's loss sum; return `loss_sum`, counts of tokens, and the statistics of `loss_fn`."""
        passed, counts = self.run_forward(batch)
        inputs = {"entropies": passed.entropies} if self.settings.entropy_bonus else {}
        inputs |= {} if passed.values is None else {"values": passed.values}
        loss: torch.Tensor
        loss, stats = loss_fn(passed.logprobs, **inputs)
        self.run_backward(loss)
        self.has_gradient = True
        return {"loss_sum": float(loss.detach()), **counts, **stats}

    def run_backward(self, loss: torch.Tensor) -> None:
        """Add the gradient of a loss."""
        loss.backward()

    @torch.no_grad()
    def logprobs(self, batch: TokenBatch) -> npt.NDArray[np.float32]:
        return host_floats(self.forward(self.module, batch, device=self.device)[0])

    def reference_logprobs(self, batch: TokenBatch) -> npt.NDArray[np.float32]:
        """Return [B, L-1] logprobs under version 0 or the reference model; with adapters version 0 is the model without them."""
        if self.reference is None and self.adapters is not None and self.settings.reference:
            with self.adapters.off():
                return self.logprobs(batch)
        if self.reference is None:
            raise BackendError("there is no reference model: open the backend with reference=True")
        return self.reference.logprobs(batch)

    def take_snapshot(self, tensors: Iterable[TensorBytes] | None = None) -> None:
        self._snapshot().load(self.weights() if tensors is None else tensors)

    def snapshot_logprobs(self, batch: TokenBatch) -> npt.NDArray[np.float32]:
        return self._snapshot().logprobs(batch)

    def _snapshot(self) -> FrozenPolicy:
        if self.snapshot is None:
            raise BackendError("there is no snapshot of the weights: open the backend with snapshot=True")
        return self.snapshot

    def adapted(self) -> Adapted | None:
        return None if self.adapters is None else self.adapters.apart()

    def weights(self) -> Sequence[TensorBytes]:
        """Return a copy of weights that are unsharded in this process, under their names in the plain model, with adapters merged.

        A GPU is not waited for until the tensors are read, and its next `step` comes after the copy.
        """
        return self.copies.copy(self.model.named_parameters()) if self.adapters is None else self.adapters.apart().merged()

    def load_weights(self, tensors: Iterable[TensorBytes]) -> None:
        """Replace all weights, or none on an error; with adapters, these are the base weights and adapters add nothing."""
        self.copies.wait()
        if self.adapters is None:
            copy_into(self.model, tensors)
        else:
            self.adapters.load(tensors)

    def export(self, directory: str | Path, tensors: Iterable[TensorBytes]) -> None:
        """Write these weights and the tokenizer in Hugging Face format, and the current adapters to a subfolder."""
        target = Path(directory)
        weights = {tensor.name: from_bytes(tensor) for tensor in tensors}
        save_model(self.model, weights, target, tokenizer=self.settings.model_path)
        if self.adapters is not None:
            self.adapters.save(target / FOLDER, base=self.settings.model_path)

    def fingerprint(self) -> dict[str, str | int]:
        """Return versions, device, threads and settings on which the last bits of the results depend."""
        on_gpu = self.device.type == "cuda"
        return {
            "backend": self.name,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "machine": platform.machine(),
            "device": torch.cuda.get_device_name(self.device) if on_gpu else "cpu",
            "processor": this_cpu().vendor,
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
            "dtype": self.settings.dtype,
            "forward": str(self.forward),
            "threads": self.settings.threads,
            "deterministic": self.settings.deterministic,
            **({"tf32": "on"} if self.settings.tf32 else {}),
            **({"lora": f"rank {self.settings.lora_rank}, alpha {self.settings.alpha:g}, merged exactly"} if self.adapters else {}),
            "processes": int(os.environ.get("WORLD_SIZE", "1")),
        }

    def peak_memory(self) -> dict[str, float]:
        """Return `peak_gpu_bytes`, the largest size of tensors on the GPU so far; empty on a CPU."""
        return {"peak_gpu_bytes": float(torch.cuda.max_memory_allocated(self.device))} if self.device.type == "cuda" else {}

    def taken_flops(self) -> dict[str, float]:
        """Return `model_flops` since the last call, and `peak_flops` of the device if that is known."""
        s, flops = self.settings, self.flops
        self.flops = 0.0
        device = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"
        peak = peak_flops(device, dtype=s.dtype, tf32=s.tf32, configured_tflops=s.peak_tflops)
        return {"model_flops": flops, **({} if peak is None else {"peak_flops": peak})}

    def random_state(self) -> dict[str, torch.Tensor]:
        state = {"cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            state["cuda"] = torch.cuda.get_rng_state(self.device)
        return state

    def set_random_state(self, state: dict[str, torch.Tensor]) -> None:
        """Restore torch's random generators to states that `random_state` returned."""
        torch.set_rng_state(state["cpu"].cpu())
        if "cuda" in state and self.device.type == "cuda":
            torch.cuda.set_rng_state(state["cuda"].cpu(), self.device)

    def close(self) -> None:
        self.module = self.model = self.reference = self.snapshot = None


def update_norm(optimizer: torch.optim.Optimizer) -> float:
    """Return the norm of AdamW's last update, computed from its moments and without weight decay; waits for the device twice."""
    states = [(group, optimizer.state[p]) for group in optimizer.param_groups for p in group["params"] if optimizer.state.get(p)]
    if not states:
        return 0.0  # no parameter ever had a gradient
    steps = torch.stack([state["step"] for _, state in states]).tolist()
    first = states[0][1]["exp_avg"]
    # A piece and its moments stay in a CPU core's cache.
    buffer = first.new_empty(2**16 if first.device.type == "cpu" else 2**24)
    sums, scales = list[torch.Tensor](), list[float]()
    for (group, state), count in zip(states, steps, strict=True):
        root = math.sqrt(1 - group["betas"][1] ** count)
        for average, square in zip(*(state[name].flatten().split(len(buffer)) for name in ("exp_avg", "exp_avg_sq")), strict=True):
            update = buffer[: len(square)]
            torch.sqrt(square, out=update).add_(group["eps"] * root)
            torch.div(average, update, out=update)
            sums.append(torch.dot(update, update))
            scales.append(root * group["lr"] / (1 - group["betas"][0] ** count))
    return math.sqrt(sum(value * scale**2 for value, scale in zip(torch.stack(sums).tolist(), scales, strict=True)))


def checked_denominator(denominator: float) -> float:
    """Return the loss denominator of a step. Raises `ValueError` unless it is finite and above 0."""
    if not denominator > 0 or denominator == float("inf"):
        raise ValueError(f"the loss denominator of a step must be a positive number, not {denominator}")
    return float(denominator)


def checked_norm(norm: float, *, step: int) -> float:
    """Return the gradient norm. Raises `Diverged` unless it is finite, because such a gradient would destroy the weights."""
    if not np.isfinite(norm):
        raise Diverged(f"training diverged: the gradient norm of optimizer step {step} is {norm}")
    return norm


@contextlib.contextmanager
def saving(directory: Path) -> Iterator[None]:
    """In the block, turn the error in which torch's writer wraps an `OSError` into that `OSError`, any other into `BackendError`."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):
            raise OSError(error.__context__.errno, error.__context__.strerror) from error
        raise BackendError(f"cannot write the trainer's state into {directory}: {str(error).splitlines()[0]}") from error


STATE_FILE = "trainer.pt"
LARGE_MODEL_BYTES = 2**28
"""Size of weights above which freed memory is returned: mapping their gradients again takes little of the step, keeping them costs as
much memory again."""


class TorchBackend(LocalModel):
    """AdamW on float32 master weights; for a float32 model these are the parameters themselves."""

    name = "torch"
    divides_late = True
    saves_in_background = True
    sharded = False

    def __init__(self, **settings: Any) -> None:
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
        self.offloaded: list[torch.Tensor] = []
        """Tensors that are on the host while the backend sleeps."""
        self.host: list[torch.Tensor] = []
        self.large = self.device.type == "cpu" and sum(parameter.nbytes for parameter in self.parameters) > LARGE_MODEL_BYTES
        self.ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1

    def backward(self, batch: TokenBatch, loss_fn: LossFunction, *, denominator: float | None = None) -> dict[str, float]:
        if self.large and not self.has_gradient:
            return_freed_memory()
        return super().backward(batch, loss_fn, denominator=denominator)

    @torch.no_grad()
    def step(self, *, denominator: float) -> StepResult:
        """Divide the gradient sum by `denominator`, clip it and update the weights. Raises `BackendError`, `Diverged`."""
        if not self.has_gradient:
            raise BackendError("an optimizer step needs at least one backward pass, and there was none since the last step")
        self._add_up_ranks()
        norm = self.divide_and_clip(self.masters, checked_denominator(denominator))
        rate = self.settings.learning_rate(self.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.copies.wait()
        self.optimizer.step()
        if self.value is not None:
            self.value.step(denominator=denominator, ranks=self.ranks)
        measures = {"update_norm": update_norm(self.optimizer), **self.peak_memory(), **self.taken_flops()}
        self.optimizer.zero_grad(set_to_none=True)
        self._publish_masters()
        self.steps += 1
        self.has_gradient = False
        return StepResult(grad_norm=norm, lr=rate, measures=measures)

    @torch.no_grad()
    def load_weights(self, tensors: Iterable[TensorBytes]) -> None:
        super().load_weights(tensors)
        if self.masters is not self.parameters:
            torch._foreach_copy_(self.masters, self.parameters)

    def save(self, directory: str | Path) -> None:
        """Write `trainer.pt`: master weights, AdamW's moments, step count, random state."""
        target = Path(directory)
        target.mkdir(parents=True, exist_ok=True)
        state = {
            "masters": [master.detach() for master in self.masters],
            "optimizer": self.optimizer.state_dict(),
            "steps": self.steps,
            "random": self.random_state(),
            **({} if self.value is None else {"value_head": self.value.state()}),
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
            raise BackendError(f"{file} was saved for a model with other parameters: set model.path to that model, or start a new run")
        self.copies.wait()
        torch._foreach_copy_(self.masters, state["masters"])
        settings_by_group = [{name: value for name, value in group.items() if name != "params"} for group in self.optimizer.param_groups]
        self.optimizer.load_state_dict(state["optimizer"])
        for group, settings in zip(self.optimizer.param_groups, settings_by_group, strict=True):
            group.update(settings)  # keep the settings of the current run
        self.optimizer.zero_grad(set_to_none=True)
        self.set_random_state(state["random"])
        if self.value is not None and "value_head" in state:
            self.value.load(state["value_head"])
        self._publish_masters()
        self.steps, self.has_gradient = state["steps"], False

    def sleep(self) -> None:
        """Move weights, masters, moments and frozen copies to pinned host memory, bit for bit; on a CPU nothing is moved."""
        assert not self.has_gradient, "a backend sleeps between two steps"
        if self.device.type == "cpu":
            return
        self.offloaded = list({id(tensor): tensor for tensor in self.state() if tensor.device == self.device}.values())
        if [host.shape for host in self.host] != [tensor.shape for tensor in self.offloaded]:
            self.host = []  # freed before as much is pinned again
            self.host = [torch.empty_like(tensor, device="cpu", pin_memory=True) for tensor in self.offloaded]
        torch._foreach_copy_(self.host, [tensor.data for tensor in self.offloaded], non_blocking=True)
        torch.cuda.synchronize(self.device)
        for tensor, host in zip(self.offloaded, self.host, strict=True):
            tensor.data = host
        torch.cuda.empty_cache()  # else torch keeps the freed memory for this process

    def wake(self) -> None:
        """Move everything back to the device; the host memory stays for the next time."""
        for tensor in self.offloaded:
            tensor.data = tensor.data.to(self.device, non_blocking=True)
        self.offloaded = []

    def state(self) -> Iterator[torch.Tensor]:
        """Yield weights, buffers, master weights and moments of the model, and weights of frozen copies: what `sleep` moves."""
        frozen = [policy.model for policy in (self.reference, self.snapshot) if policy is not None]
        for model in (self.model, *frozen):
            yield from model.parameters()
            yield from model.buffers()
        yield from self.masters
        yield from self.value.tensors() if self.value is not None else ()
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
    """Return a hook that adds a low-precision parameter's gradient to the master's float32 sum as soon as it is computed."""

    @torch.no_grad()
    def move(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        if master.grad is None:
            master.grad = parameter.grad.float()
        else:
            master.grad.add_(parameter.grad)
        parameter.grad = None

    return move
