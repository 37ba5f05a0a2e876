"""Computes a micro-batch's log-probabilities: on rows that share their prefixes and have no padding, or on padded rows.

The rule: which way a model takes is chosen once, when it is opened, by comparing it with the plain forward; losses see [B, L-1].
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from penstock.infra.backends.batch import TokenBatch
from penstock.infra.backends.logprobs import tree_attention
from penstock.infra.backends.logprobs.prefix_tree import prefix_tree
from penstock.infra.backends.logprobs.token_logprobs import token_logprobs
from penstock.infra.errors import BackendError


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """The way that a model's log-probabilities are computed."""

    shared: bool = False
    """Every distinct prefix is computed once and no padding, else all rows at one length."""
    in_pieces: bool = False
    """Logits come from the hidden states, a piece at a time, else from the model itself, all at once."""

    def __call__(
        self, module: Any, batch: TokenBatch, *, device: torch.device, entropy: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None, int]:
        """([B, L-1] float32 log-probabilities, 0 where nothing is trained; likewise entropies, if asked for; tokens computed).

        `module` is the model, or an engine around it.
        """
        if not self.shared:
            return self._padded(module, batch, device=device, entropy=entropy)
        tree = prefix_tree(batch).to(device)
        with tree_attention.tree_expected():
            states, head = self._run(module, **tree_attention.tree_inputs(tree), logits_to_keep=tree.predict)
        drawn, entropies = token_logprobs(
            states[0], head=head, temperatures=tree.temperatures, row=tree.row, target=tree.target, entropy=entropy,
            support=_support_at(tree.slot, batch),
        )  # fmt: skip
        return _in_place(drawn, tree.slot, batch), None if entropies is None else _in_place(entropies, tree.slot, batch), len(tree.ids)

    def _padded(
        self, module: Any, batch: TokenBatch, *, device: torch.device, entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None, int]:
        """No attention mask is passed: with padding on the right causality hides it, and attention without a mask takes the fast path."""
        input_ids = torch.from_numpy(batch.input_ids).to(device, non_blocking=True)
        columns = torch.from_numpy(batch.logit_columns()).to(device)
        states, head = self._run(module, input_ids=input_ids[:, :-1], logits_to_keep=columns)
        rows, width = states.shape[:2]
        temperatures = torch.from_numpy(batch.temperatures).to(device).repeat_interleave(width)
        trained = torch.from_numpy(batch.completion_mask).to(device)[:, columns].flatten()
        row = trained.nonzero()[:, 0] if trained.any() else torch.zeros(1, dtype=torch.int64, device=device)
        slot = row // width * (input_ids.shape[1] - 1) + columns[row % width]
        drawn, entropies = token_logprobs(
            states.reshape(rows * width, -1), head=head, temperatures=temperatures, row=row,
            target=input_ids[:, 1:][:, columns].flatten()[row], entropy=entropy, support=_support_at(slot, batch),
        )  # fmt: skip
        placed = None if entropies is None else _in_place(entropies, slot, batch)
        return _in_place(drawn, slot, batch), placed, rows * (input_ids.shape[1] - 1)

    def _run(self, module: Any, **inputs: Any) -> tuple[torch.Tensor, Any]:
        """Hidden states and the output layer's weight and bias, or logits and None."""
        if not self.in_pieces:
            return module(**inputs, use_cache=False).logits, None
        layer = module.get_output_embeddings()
        with _passing(layer):
            states = module(**inputs, use_cache=False).logits
        return states, (layer.weight, getattr(layer, "bias", None))

    def __str__(self) -> str:
        return f"{'shared' if self.shared else 'padded'} rows, logits {'in pieces' if self.in_pieces else 'whole'}"


def choose_forward(model: Any, *, share: str, device: torch.device, in_pieces: bool = True) -> Forward:
    """The best way whose log-probabilities are the plain forward's; leaves the model with the attention that it needs.

    `share` is `trainer.share_prompts`: `auto` shares where it holds, `on` raises `BackendError` where it does not, `off` is the plain way.
    """
    plain = Forward()
    if share == "off":
        return plain
    batch = _trial_batch(model.config.get_text_config().vocab_size)
    in_pieces = in_pieces and _gap(model, batch, Forward(in_pieces=True), plain, device=device) is None
    wanted = Forward(shared=True, in_pieces=in_pieces)
    model.set_attn_implementation(tree_attention.NAME)
    reason = _gap(model, batch, wanted, plain, device=device)
    if reason is None:
        return wanted
    model.set_attn_implementation("sdpa")
    if share == "on":
        kind = model.config.model_type
        raise BackendError(f"trainer.share_prompts: a model of type {kind!r} cannot share prompts ({reason}); set it to 'auto' or 'off'")
    return Forward(in_pieces=in_pieces)


@torch.no_grad()
def _gap(model: Any, batch: TokenBatch, tried: Forward, plain: Forward, *, device: torch.device) -> str | None:
    """Why the two differ, or None; in low precision only what is far from rounding counts."""
    try:
        found, expected = (forward(model, batch, device=device)[0] for forward in (tried, plain))
    # The boundary to a hundred architectures: what cannot run is not used.
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    apart = (found - expected).abs()[torch.from_numpy(batch.completion_mask).to(device)]
    limit = 1e-3 if model.dtype == torch.float32 else 0.15
    gap = float(apart.mean())
    return None if gap <= limit else f"its logprobs differ by {gap:.2g} on average"


def _trial_batch(vocabulary: int) -> TokenBatch:
    """Two prompts with a common head, three completions of each: drawn from a generator of its own."""
    random = np.random.default_rng(0)
    ids = random.integers(0, vocabulary, (6, 33))
    ids[:, :8] = ids[0, :8]
    ids[1:3, :24], ids[4:, :24] = ids[0, :24], ids[3, :24]
    ids[2, :27] = ids[1, :27]
    ends = np.array([33, 30, 28, 27, 33, 31])
    real = np.arange(33)[None] < ends[:, None]
    return TokenBatch(
        input_ids=np.where(real, ids, 0), attention_mask=real, completion_mask=real[:, 1:] & (np.arange(32) >= 23)[None],
        behaviour_logprobs=np.zeros((6, 32), np.float32), advantages=np.zeros(6, np.float32), temperatures=np.ones(6, np.float32),
        groups=np.arange(6) // 3, samples=np.arange(6) % 3,
    )  # fmt: skip


def _support_at(slot: torch.Tensor, batch: TokenBatch) -> torch.Tensor | None:
    """[M, k] ids that the tokens at these places of [B, L-1] were drawn from; None where all were drawn from the whole vocabulary."""
    if batch.support is None:
        return None
    return torch.from_numpy(batch.support).to(slot.device, torch.int64).flatten(0, 1)[slot]


def _in_place(drawn: torch.Tensor, slot: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    shape = batch.completion_mask.shape
    flat = torch.zeros(shape[0] * shape[1], dtype=drawn.dtype, device=drawn.device).index_copy(0, slot, drawn)
    return torch.where(torch.from_numpy(batch.completion_mask).to(drawn.device), flat.view(shape), 0.0)


@contextlib.contextmanager
def _passing(layer: Any) -> Iterator[None]:
    """Within it the output layer hands its input on, so that a model gives hidden states where it would give logits."""
    layer.forward = lambda states: states
    try:
        yield
    finally:
        del layer.forward
