"""The engines by their name in `rollout.engine`."""

from collections.abc import Mapping

from penstock.infra.engines import toy
from penstock.infra.engines.base import EngineKind
from penstock.infra.engines.transformers import kind as transformers
from penstock.infra.engines.vllm import kind as vllm

ENGINES: Mapping[str, EngineKind] = {"transformers": transformers.KIND, "vllm": vllm.KIND, "toy": toy.KIND}
