"""Which engine a configuration names; the heavy ones are imported when they are made."""

from infra.engines.requests import Engine
from pipeline.config import Config


def make_engine(config: Config) -> Engine:
    """An engine with the initial model loaded. Raises `EngineError`."""
    rollout = config.rollout
    if rollout.engine == "toy":
        from infra.engines.toy_engine import ToyEngine

        return ToyEngine()
    from infra.engines.transformers_engine import TransformersEngine

    return TransformersEngine(config.model.path, dtype=rollout.dtype, device=rollout.device, threads=rollout.threads)
