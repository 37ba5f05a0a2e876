"""Trainer backend on DeepSpeed, ZeRO stages 0-3, whose checkpoints any number of processes can load.

The caller, not DeepSpeed, ends a step (`managed_gradient_accumulation` is off). `step` divides the float32 gradient partitions by the
step's denominator through the hook that undoes a loss scale. DeepSpeed itself rejects a checkpoint of another number of processes, or first
converts the full state to a file per parameter; here each process reads its part from the shards, bit for bit and without executing code:
tensors, plain values and the three classes that ZeRO stores. Files that other users own or may write are rejected.
"""

import contextlib
import gc
import json
import os
import pickle
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pydantic
import torch

from penstock.infra.backends.arithmetic import choose_device
from penstock.infra.backends.base import StepResult
from penstock.infra.backends.deepspeed import options
from penstock.infra.backends.ranks.process_set import import_deepspeed, join_process_group
from penstock.infra.backends.torch_backend import LocalModel, checked_denominator, checked_norm, saving
from penstock.infra.errors import BackendError
from penstock.infra.tensors.stream import TensorBytes
from penstock.infra.tensors.torch_copy import copy_all, dtype_name, fitting, from_bytes

OTHERS_WRITE = 0o022


def read_stored(file: Path) -> Any:
    """Load a file, mapped into memory. Raises `BackendError` if it refers to other classes, or if other users may write it."""
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    for path in (file.parent, file):
        _check_owner(path)
    stored = (LossScaler, ZeroStageEnum, fragment_address)
    names = {f"{kind.__module__}.{kind.__qualname__}" for kind in stored}
    if foreign := sorted(set(torch.serialization.get_unsafe_globals_in_checkpoint(file)) - names):
        raise BackendError(f"{file} was not loaded: it refers to {foreign[0]}, which DeepSpeed does not store and which could run code")
    with torch.serialization.safe_globals(list(stored)):
        return torch.load(file, map_location="cpu", mmap=True, weights_only=True)


def check_stored(directory: Path) -> None:
    """Raise `BackendError` unless `read_stored` accepts each file of a checkpoint, which DeepSpeed will unpickle."""
    for file in sorted(directory.rglob("*.pt")):
        read_stored(file)


def _check_owner(path: Path) -> None:
    """Raise `BackendError` if another user owns a file or folder or may write to it: such a checkpoint could run code."""
    status = path.stat()
    if status.st_uid not in (os.getuid(), 0):
        raise BackendError(f"{path} belongs to another user, who could change it: copy the checkpoint to a folder that you own")
    if status.st_mode & OTHERS_WRITE:
        raise BackendError(f"other users can write to {path}: run chmod -R go-w {path.parent}")


MASTER, MOMENTS = "fp32", ("exp_avg", "exp_avg_sq")
"""States of each element of a shard; AdamW's moments exist from the first step on."""


class Shards:
    """The trainer state in a checkpoint's files, one per process that wrote it (a shard), addressed by parameter."""

    def __init__(self, directory: Path) -> None:
        """Map the files of `directory` into memory. Raises `BackendError` if there are none."""
        models, optimizers = sorted(directory.glob("*_model_states.pt")), list(directory.glob("*_optim_states.pt"))
        if not models or not optimizers:
            raise BackendError(f"there is no trainer state in {directory}: expected *_model_states.pt and *_optim_states.pt")
        self.common = read_stored(models[0])
        """Rank 0's file: the model, and the state of the run."""
        self.step: torch.Tensor | None = None
        """AdamW's step count; None without moments."""
        self._pieces: dict[str, list[tuple[Mapping[str, torch.Tensor], int, int]]] = defaultdict(list)
        """Parameter -> its pieces in order: flat states, start and number of elements."""
        optimizers.sort(key=lambda file: int(file.name.split("zero_pp_rank_")[1].split("_")[0]))
        parts = [read_stored(file)["optimizer_state_dict"] for file in optimizers]
        for rank, part in enumerate(parts):
            flat = part["fp32_flat_groups" if "fp32_flat_groups" in part else "single_partition_of_fp32_groups"]
            states = part["optimizer_state_dict" if "fp32_flat_groups" in part else "base_optimizer_state"]["state"]
            self.step = next(iter(states.values()))["step"] if states else self.step
            for group, ranges in enumerate(self._ranges(part, rank, len(parts))):
                tensors = {**states.get(group, {}), MASTER: flat[group]}
                for name, (start, count) in ranges.items():
                    self._pieces[name].append((tensors, start, count))

    def size(self, name: str) -> int:
        """Return the number of stored elements of a parameter; 0 if it is missing."""
        return sum(count for _, _, count in self._pieces.get(name, []))

    def copy(self, kind: str, name: str, offset: int, target: torch.Tensor) -> None:
        """Fill `target` [N] with the elements from `offset` on of a parameter's state `kind`: master weights or a moment."""
        first = 0
        for tensors, start, count in self._pieces[name]:
            low, high = max(offset, first), min(offset + target.numel(), first + count)
            if low < high:
                target[low - offset : high - offset] = tensors[kind][start + low - first : start + high - first]
            first += count

    def _ranges(self, part: Mapping[str, Any], rank: int, ranks: int) -> Iterator[dict[str, tuple[int, int]]]:
        """Yield, for each flat tensor of a shard, parameter -> start and number of elements of its part there."""
        if "fp32_flat_groups" not in part:
            for mapping in part["param_slice_mappings"]:
                yield {name: (address.start, address.numel) for name, address in mapping.items()}
            return
        for shapes in self.common["param_shapes"]:
            ranges, start = {}, 0
            for name, shape in shapes.items():
                share = -(-shape.numel() // ranks)
                ranges[name] = (start, max(0, min(share, shape.numel() - rank * share)))
                start += share
            yield ranges


@torch.no_grad()
def load_shards(engine: Any, directory: Path) -> Mapping[str, Any]:
    """Restore this process's master weights and moments, and all weights; return the `client_state`.

    The optimizer keeps the settings of the current run. Raises `BackendError` if there is no state or it is of another model.
    """
    shards, optimizer = Shards(directory), engine.optimizer
    trained = {name: parameter for name, parameter in engine.module.named_parameters() if parameter.requires_grad}
    if any(shards.size(name) != getattr(parameter, "ds_numel", parameter.numel()) for name, parameter in trained.items()):
        raise BackendError(f"{directory} was saved for a model with other parameters: set model.path to that model, or start a new run")
    partitioned = engine.zero_optimization_partition_weights()
    for master, pieces in _partitioned(optimizer) if partitioned else _whole(optimizer):
        fresh = {kind: torch.zeros_like(master) for kind in (MASTER, *(MOMENTS if shards.step is not None else ()))}
        for name, offset, start, count in pieces:
            for kind, flat in fresh.items():
                shards.copy(kind, name, offset, flat[start : start + count])
        master.copy_(fresh.pop(MASTER))
        counted = {} if shards.step is None else {"step": shards.step.to(master.device, copy=True)}
        optimizer.optimizer.state[master] = {**counted, **fresh}
    if partitioned:
        _publish(optimizer)
    else:
        engine.module.load_state_dict(shards.common["module"])
    return shards.common


Pieces = Iterator[tuple[str, int, int, int]]
"""Pieces of a process's flat master: parameter, first element, start in the master, number of elements."""


def _whole(optimizer: Any) -> Iterator[tuple[torch.Tensor, Pieces]]:
    """Yield each flat master of this process with its pieces, in ZeRO stages 1 and 2: a group's joined parameters in equal parts."""

    def pieces(parameters: list[Any]) -> Pieces:
        for parameter in parameters:
            if (own := parameter._hp_mapping) is not None:
                address = own.lp_fragment_address
                yield optimizer.param_names[parameter], address.start, own.hp_fragment_address.start, address.numel

    for master, parameters in zip(optimizer.single_partition_of_fp32_groups, optimizer.bit16_groups, strict=True):
        yield master, pieces(parameters)


def _partitioned(optimizer: Any) -> Iterator[tuple[torch.Tensor, Pieces]]:
    """Yield each flat master of this process with its pieces, in ZeRO stage 3: each parameter in equal parts."""
    rank = torch.distributed.get_rank()

    def pieces(parameters: list[Any]) -> Pieces:
        start = 0
        for parameter in parameters:
            share = parameter.partition_numel()
            yield optimizer.param_names[parameter], rank * share, start, max(0, min(share, parameter.ds_numel - rank * share))
            start += share

    for master, parameters in zip(optimizer.fp32_partitioned_groups_flat, optimizer.fp16_groups, strict=True):
        yield master, pieces(parameters)


def _publish(optimizer: Any) -> None:
    """Copy the master weights of stage 3 to the model, as DeepSpeed does after loading."""
    optimizer.checkpoint_event_prologue()
    for master, weights, parts in zip(
        optimizer.fp32_partitioned_groups_flat, optimizer.fp16_partitioned_groups_flat, optimizer.fp16_partitioned_groups, strict=True
    ):
        weights.copy_(master)
        for part, new in zip(parts, optimizer.unflatten(weights, parts), strict=True):
            part.data = new.data
    optimizer.checkpoint_event_epilogue()


TAG = "deepspeed"


class DeepSpeedBackend(LocalModel):
    """AdamW under ZeRO (arXiv 1910.02054): optimizer state (1), gradients (2) and parameters (3) sharded over the processes."""

    name = "deepspeed"
    divides_late = True
    saves_in_background = False  # backward passes move its parameters and gradients between processes

    def __init__(
        self, *, zero_stage: int = 2, offload: str = "none", deepspeed_config: Mapping[str, Any] | None = None, **settings: Any
    ) -> None:
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

    def run_backward(self, loss: torch.Tensor) -> None:
        self.engine.backward(loss)

    def step(self, *, denominator: float) -> StepResult:
        """Divide the gradient sum by `denominator`, clip it and update the weights. Raises `BackendError`, `Diverged`."""
        if not self.has_gradient:
            raise BackendError("an optimizer step needs at least one backward pass, and there was none since the last step")
        # DeepSpeed averages over the processes. Scaling the loss instead would change the rounding of the backward pass.
        self.denominator = checked_denominator(denominator) / self.world_size
        rate = self.settings.learning_rate(self.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        if self.zero_stage:
            self.optimizer.override_loss_scale(self.denominator)
        self.copies.wait()
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

    def weights(self) -> Sequence[TensorBytes]:
        """Return a copy of the full weights; under ZeRO-3 a collective that every process must enter, one parameter at a time."""
        if self.zero_stage < 3:
            return super().weights()
        parameters = dict(self.model.named_parameters())
        described = {name: (dtype_name(weight.dtype), tuple(weight.ds_shape)) for name, weight in parameters.items()}
        tensors = self.copies.take(described)
        for tensor in tensors:
            with self._whole(parameters[tensor.name]), torch.no_grad():
                from_bytes(tensor).copy_(parameters[tensor.name])
        return tensors

    def join_weights(self) -> None:
        for parameter in self.model.parameters():
            with self._whole(parameter):
                pass

    @torch.no_grad()
    def load_weights(self, tensors: Iterable[TensorBytes]) -> None:
        """Replace all parameters and their float32 masters, or none on an error."""
        if self.adapters is not None:
            super().load_weights(tensors)
            if self.zero_stage:
                self.optimizer.refresh_fp32_params()
            return
        self.copies.wait()
        parameters = dict(self.model.named_parameters())
        shapes = {name: tuple(getattr(parameter, "ds_shape", parameter.shape)) for name, parameter in parameters.items()}
        new_weights = fitting(tensors, shapes=shapes)
        for name, parameter in parameters.items():
            with self._whole(parameter, writer=0):
                copy_all([(parameter, new_weights[name])])
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
        self.copies.wait()
        try:
            state = load_shards(self.engine, Path(directory) / TAG) if self.zero_stage else self._load_whole(directory)
        except (OSError, RuntimeError, EOFError, KeyError, AssertionError, pickle.UnpicklingError) as error:
            raise BackendError(f"cannot read the trainer's state in {directory}: {(str(error) or repr(error)).splitlines()[0]}") from error
        self.set_random_state(state["random"])
        self.steps, self.has_gradient = state["steps"], False

    def fingerprint(self) -> dict[str, str | int]:
        """Return what the last bits of the results depend on: as for `torch`, and DeepSpeed's version, ZeRO stage, offload, options."""
        return super().fingerprint() | {
            "deepspeed": self.deepspeed.__version__,
            "zero_stage": self.zero_stage,
            **({} if self.offload == "none" else {"offload": self.offload}),
            **({"deepspeed_config": json.dumps(self.options, sort_keys=True)} if self.options else {}),
        }

    def close(self) -> None:
        """Free DeepSpeed's state and hooks; the process group stays until the process ends, as does what DeepSpeed caches under ZeRO-3."""
        self.engine.destroy()
        self.engine = self.optimizer = None
        super().close()
        gc.collect()  # engine, hooks and model refer to each other

    def _config(self) -> dict[str, Any]:
        """Return DeepSpeed's configuration: Penstock's settings with the user's options merged over them."""
        clip = self.settings.max_grad_norm if self.zero_stage else 0.0  # stage 0 clips in `_divide_and_clip`
        host = {"device": "cpu", "pin_memory": self.device.type == "cuda"}
        offloaded = {"offload_optimizer": host} if self.offload != "none" else {}
        if self.offload == "parameters":
            offloaded["offload_param"] = host
        overlaps = self.device.type == "cuda" and self.zero_stage > 1 and self.world_size > 1  # a CPU has no second stream
        buckets = {"overlap_comm": True, "reduce_bucket_size": options.OVERLAPPING_BUCKET} if overlaps else {"overlap_comm": False}
        ours = {
            "train_micro_batch_size_per_gpu": 1,  # counts calls, because the engine has no data loader
            "gradient_accumulation_steps": 1,
            "managed_gradient_accumulation": False,
            "gradient_clipping": clip,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": {"stage": self.zero_stage, **buckets, **offloaded},
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
            raise BackendError(f"DeepSpeed rejects trainer.deepspeed_config: {reason}") from error

    def _load_whole(self, directory: str | Path) -> Mapping[str, Any]:
        """Load and return the state of stage 0, which every process has in full; the optimizer keeps the current run's settings."""
        settings = [{name: value for name, value in group.items() if name != "params"} for group in self.optimizer.param_groups]
        check_stored(Path(directory) / TAG)
        path, state = self.engine.load_checkpoint(str(directory), tag=TAG)
        if path is None:
            raise BackendError(f"there is no trainer state in {directory}: expected a folder {TAG} with DeepSpeed's files")
        for group, current in zip(self.optimizer.param_groups, settings, strict=True):
            group.update(current)
        return dict(state)

    def _whole(self, parameter: torch.nn.Parameter, *, writer: int | None = None) -> Any:
        if self.zero_stage < 3:
            return contextlib.nullcontext()
        return self.deepspeed.zero.GatheredParameters([parameter], modifier_rank=writer)

    def _divide_and_clip(self) -> None:
        """Divide and clip under stage 0, which runs the plain optimizer: called between DeepSpeed's averaging and AdamW's update."""
        self.norm = self.divide_and_clip(self.model.parameters(), self.denominator)
