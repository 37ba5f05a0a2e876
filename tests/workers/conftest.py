"""A model small enough that a whole run takes seconds, and a finished run of it for those who only look."""

import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.infra.kafka.log import KafkaLog
from tests.support.recorded_run import JUDGE, RecordedRun
from tests.support.worker_set import complete, config_of


@pytest.fixture(scope="session")
def tiny_model(made_once: Callable[[str, Callable[[Path], object]], Path]) -> Path:
    """A Qwen3-shaped model with random weights and a character tokenizer."""
    return made_once("tiny-qwen3", _make_model)


def _make_model(directory: Path) -> None:
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    special = ["<pad>", "<bos>", "<eos>", "<unk>"]
    vocabulary = {token: number for number, token in enumerate(special + [chr(code) for code in range(32, 127)] + ["\n"])}
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    characters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    characters.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=characters, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>", model_max_length=2048
    )
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=1, num_key_value_heads=1,
        head_dim=32, max_position_embeddings=2048, tie_word_embeddings=True, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


@pytest.fixture(scope="session")
def recorded(broker: str, tiny_model: Path, empty_database: Path, tmp_path_factory: pytest.TempPathFactory) -> RecordedRun:
    """A `one_step_off` run with two rollout workers and a tracker: groups trained, filtered, and failed with their dead letters."""
    directory = tmp_path_factory.mktemp("recorded")
    shutil.copy(empty_database, directory / "mlflow.db")
    uri = f"sqlite:///{directory / 'mlflow.db'}"
    config = config_of(
        tiny_model,
        directory,
        run={"steps": 8, "seed": 7},
        reward={
            "functions": [f"{directory / 'judge.py'}:digits", f"{directory / 'judge.py'}:brevity"],
            "weights": [1.0, 0.5],
            "on_error": "drop",
        },
        schedule={"mode": "one_step_off"},
        trainer={"checkpoint_every": 4},
        mlflow={"enabled": True, "tracking_uri": uri},
    )
    (directory / "judge.py").write_text(JUDGE)
    run = f"recorded-{uuid.uuid4().hex[:6]}"
    report = complete(broker, run, config, roles=("trainer", "rollout", "scorer", "feeder", "tracker"))
    fates = report["groups"]
    assert fates["trained"] == 32 and fates["filtered"] and fates["failed"], fates
    return RecordedRun(run=run, bootstrap=broker, config=config, report=report, mlflow_uri=uri)


@pytest.fixture(scope="session")
def log(recorded: RecordedRun) -> Iterator[KafkaLog]:
    opened = KafkaLog(recorded.bootstrap, client_id="test")
    yield opened
    opened.close()
