"""What stays in the host's memory changes no bit of a step; and DeepSpeed's own options reach it, or are refused in one line."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from penstock.infra.backends.model import saved_on_host
from penstock.infra.backends.registry import open_backend
from penstock.infra.errors import BackendError
from penstock.infra.tensors.stream import digest
from tests.support.training import save_tiny_model, train

pytestmark = pytest.mark.costly  # imports transformers

Open = Callable[..., Any]
BUCKET = {"zero_optimization": {"reduce_bucket_size": 4096}}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def opened(model_path: str) -> Iterator[Open]:
    backends = []

    def make(name: str, **settings: Any) -> Any:
        backends.append(open_backend(name, **{"model_path": model_path, "lr": 1e-2, "weight_decay": 0.1, **settings}))
        return backends[-1]

    yield make
    for backend in backends:
        backend.close()


@pytest.mark.parametrize(("name", "own"), [
    ("torch", {}), ("torch", {"gradient_checkpointing": True}), ("torch", {"dtype": "bfloat16", "lora_rank": 4}),
    ("deepspeed", {"zero_stage": 2}), ("deepspeed", {"zero_stage": 3, "gradient_checkpointing": True}),
])  # fmt: skip
def test_activations_that_wait_in_the_hosts_memory_come_back_bit_for_bit(opened: Open, name: str, own: dict[str, Any]) -> None:
    plain, moved = opened(name, **own), opened(name, offload_activations=True, **own)
    assert train(moved, 2) == train(plain, 2)
    assert digest(moved.weights()) == digest(plain.weights())
    assert moved.fingerprint() == plain.fingerprint()


def test_weights_are_not_moved_with_the_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[tuple[int, ...]] = []
    host = torch.autograd.graph.save_on_cpu()
    keep = host.pack_hook
    host.pack_hook = lambda tensor: moved.append(tuple(tensor.shape)) or keep(tensor)
    monkeypatch.setattr(torch.autograd.graph, "save_on_cpu", lambda **_: host)
    layer, given = torch.nn.Linear(5, 3), torch.ones(2, 5, requires_grad=True)
    with saved_on_host(layer, device=torch.device("cpu")):
        result = layer(given).sum()
    result.backward()
    assert (2, 5) in moved
    assert not {(3, 5), (5, 3)} & set(moved)
    torch.testing.assert_close(given.grad, layer.weight.detach().sum(0).expand(2, 5))


@pytest.mark.parametrize("own", [
    {"zero_stage": 1, "offload": "optimizer"},
    {"zero_stage": 2, "offload": "optimizer"},
    {"zero_stage": 2, "offload": "optimizer", "dtype": "bfloat16"},
    {"zero_stage": 3, "offload": "optimizer"},
    {"zero_stage": 3, "offload": "parameters", "dtype": "bfloat16"},
])  # fmt: skip
def test_an_optimizer_in_the_hosts_memory_takes_the_same_steps(opened: Open, own: dict[str, Any]) -> None:
    plain, moved = opened("deepspeed", **own | {"offload": "none"}), opened("deepspeed", **own)
    assert {state["exp_avg"].device.type for state in moved.optimizer.optimizer.state.values()} <= {"cpu"}
    expected, found = train(plain, 3), train(moved, 3)
    assert [loss for loss, _ in found] == [loss for loss, _ in expected]
    norms = [[step.grad_norm for _, step in steps] for steps in (found, expected)]
    assert norms[0] == (norms[1] if own["zero_stage"] < 3 else pytest.approx(norms[1], rel=1e-6))  # its squares are added in another order
    assert digest(moved.weights()) == digest(plain.weights())
    for backend in (moved, plain):
        backend.load_weights(plain.weights())
    assert train(moved, 1)[0][0] == train(plain, 1)[0][0]
    assert digest(moved.weights()) == digest(plain.weights())
    assert moved.fingerprint() == plain.fingerprint() | {"offload": own["offload"]}


def test_options_reach_deepspeed_and_stand_in_the_fingerprint(opened: Open) -> None:
    plain = opened("deepspeed", zero_stage=2)
    messages = opened("deepspeed", zero_stage=2, deepspeed_config=BUCKET | {"bf16": {"enabled": "auto"}})
    assert messages.engine.zero_reduce_bucket_size() == 4096
    assert messages.fingerprint() == plain.fingerprint() | {"deepspeed_config": '{"zero_optimization": {"reduce_bucket_size": 4096}}'}
    assert messages.engine.gradient_clipping() == 1.0


@pytest.mark.parametrize(("options", "line"), [
    ({"reduce_bucket_sise": 5}, r"reduce_bucket_sise = 5: Extra inputs are not permitted$"),
    ({"reduce_bucket_size": "many"}, r"reduce_bucket_size = 'many': Input should be a valid integer[^\n]*$"),
])  # fmt: skip
def test_what_deepspeed_refuses_is_one_line(opened: Open, options: dict[str, Any], line: str) -> None:
    with pytest.raises(BackendError, match=rf"^DeepSpeed rejects trainer\.deepspeed_config: {line}"):
        opened("deepspeed", zero_stage=2, deepspeed_config={"zero_optimization": options})
