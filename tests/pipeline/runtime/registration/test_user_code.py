"""Which names in a configuration are code: all that are not known to be none."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from penstock.pipeline.config.load import from_table
from penstock.pipeline.runtime.registration.trust import OTHER_FORMATS, keys_of, user_code
from tests.support.least_config import merged

PLAIN: dict[str, dict[str, Any]] = {
    "run": {"steps": 3},
    "model": {"path": "/models/tiny"},
    "data": {"source": "tiny:successor", "size": 8},
    "reward": {"functions": ["exact_match"]},
}

CONNECTOR = ("rollout.vllm.kv_transfer_config", "{'kv_connector_module_path': 'evil'}")
OVERRIDES = ("rollout.vllm.hf_overrides", "{'auto_map': {'AutoConfig': 'evil'}}")


def named(**sections: dict[str, Any]) -> list[tuple[str, str]]:
    return user_code(from_table(merged(PLAIN, sections)))


@pytest.mark.parametrize(
    ("section", "table", "key", "name"),
    [
        ("data", {"source": "rows.py:make"}, "data.source", "rows.py:make"),
        ("data", {"source": "subprocess:getoutput?cmd=id"}, "data.source", "subprocess:getoutput?cmd=id"),
        ("data", {"source": ["tiny:successor", "my.package:rows"]}, "data.source", "my.package:rows"),
        ("data", {"source": "newscheme:x"}, "data.source", "newscheme:x"),
        ("data", {"source": "hf:org/name?trust_remote_code=true"}, "data.source", "hf:org/name?trust_remote_code=true"),
        ("data", {"source": "hf:pandas?data_files=rows.pkl"}, "data.source", "hf:pandas?data_files=rows.pkl"),
        ("data", {"source": ["hf:sql?con=x", "hf:csv?data_files=x"]}, "data.source", "hf:sql?con=x"),
        ("eval", {"source": "hf:generator"}, "eval.source", "hf:generator"),
        ("data", {"source": "hf:hf://datasets/pandas"}, "data.source", "hf:hf://datasets/pandas"),
        ("data", {"source": ["hf:imdb", "hf:iceberg?x=y"]}, "data.source", "hf:iceberg?x=y"),
        ("data", {"source": "hf:lance"}, "data.source", "hf:lance"),
        ("eval", {"source": "os:listdir"}, "eval.source", "os:listdir"),
        ("eval", {"functions": ["/x/f.py:f"]}, "eval.functions", "/x/f.py:f"),
        ("reward", {"functions": ["exact_match", "os:system?command=id"]}, "reward.functions", "os:system?command=id"),
        ("reward", {"functions": ["http://judge:8000/helpful"]}, "reward.functions", "http://judge:8000/helpful"),
        ("environment", {"source": "agent:python agent.py"}, "environment.source", "agent:python agent.py"),
        ("environment", {"source": "game.py:Game"}, "environment.source", "game.py:Game"),
        ("environment", {"source": "gymnasium:os:Evil-v0"}, "environment.source", "gymnasium:os:Evil-v0"),
        ("environment", {"source": "openenv:ws://host:1"}, "environment.source", "openenv:ws://host:1"),
        ("environment", {"source": "gymnasium:X-v0?entry_point=os:system"}, "environment.source", "gymnasium:X-v0?entry_point=os:system"),
        ("algorithm", {"loss": "loss.py:loss", "aggregate": "token_mean"}, "algorithm.loss", "loss.py:loss"),
        ("algorithm", {"advantage": "os:getcwd"}, "algorithm.advantage", "os:getcwd"),
        ("algorithm", {"advantage": "own.py:f?scale=2"}, "algorithm.advantage", "own.py:f?scale=2"),
        ("rollout", {"vllm": {"worker_cls": "evil.worker.Worker"}}, "rollout.vllm.worker_cls", "evil.worker.Worker"),
        ("rollout", {"vllm": {"worker_extension_cls": "evil"}}, "rollout.vllm.worker_extension_cls", "evil"),
        ("rollout", {"vllm": {"load_format": "pt"}}, "rollout.vllm.load_format", "pt"),
        ("rollout", {"vllm": {"kv_transfer_config": {"kv_connector_module_path": "evil"}}}, *CONNECTOR),
        ("rollout", {"vllm": {"hf_overrides": {"auto_map": {"AutoConfig": "evil"}}}}, *OVERRIDES),
        ("rollout", {"vllm": {"reasoning_parser_plugin": "evil"}}, "rollout.vllm.reasoning_parser_plugin", "evil"),
        ("rollout", {"vllm": {"trust_remote_code": True}}, "rollout.vllm.trust_remote_code", "True"),
        ("rollout", {"vllm": {"logits_processors": ["evil:P"]}}, "rollout.vllm.logits_processors", "['evil:P']"),
        ("trainer", {"backend": "deepspeed", "initial_state": "/tmp/pickles", "initial_steps": 1}, "trainer.initial_state", "/tmp/pickles"),
    ],
)
def test_functions_commands_services_and_pickles_are_code(section: str, table: dict[str, Any], key: str, name: str) -> None:
    assert named(**{section: table}) == [(key, name)]


@pytest.mark.parametrize(
    ("section", "table"),
    [
        ("data", {}),
        ("data", {"source": "/rows/train.jsonl"}),
        ("data", {"source": ["hf:org/name?config=main", "reasoning-gym:chain_sum?max_terms=3"]}),
        ("data", {"source": ["hf:json?data_files=rows.json", "hf:parquet?data_files=x", "hf:/rows"]}),
        ("data", {"source": ["hf:gsm8k?config=main", "hf:imdb", "hf:squad", "hf:ag_news", "hf:org/pandas"]}),
        ("eval", {"source": "hf:hf://datasets/imdb"}),
        ("eval", {"source": "tiny:successor", "functions": ["exact_match"]}),
        ("environment", {"source": "tiny:lake"}),
        ("environment", {"source": "textarena:Wordle-v0?word_length=5"}),
        ("algorithm", {"loss": "dr_grpo"}),
        ("algorithm", {"loss": "gspo", "advantage": "grpo"}),
        ("rollout", {"vllm": {"tensor_parallel_size": 2, "quantization": "fp8", "trust_remote_code": False, "dtype": "bfloat16"}}),
        ("trainer", {"initial_state": "/runs/x/start/backend", "initial_steps": 1}),
    ],
)
def test_built_in_names_and_rows_are_none(section: str, table: dict[str, Any]) -> None:
    assert named(**{section: table}) == []


def test_every_format_of_the_installed_library_is_known() -> None:
    library = importlib.util.find_spec("datasets")
    assert library is not None
    assert library.origin is not None
    formats = {file.parent.name for file in Path(library.origin).parent.glob("packaged_modules/*/__init__.py")}
    assert formats - OTHER_FORMATS <= {"arrow", "csv", "json", "parquet", "text", "folder_based_builder"}


def test_what_the_operator_has_given_and_what_a_command_does_not_execute_is_left_out() -> None:
    config = from_table({**PLAIN, "reward": {"functions": ["f.py:f"]}, "algorithm": {"loss": "l.py:l", "aggregate": "constant"}})
    assert user_code(config, sections=("reward",)) == [("reward.functions", "f.py:f")]
    assert user_code(config, overridden=keys_of(["algorithm.loss=l.py:l"])) == [("reward.functions", "f.py:f")]
    assert user_code(config, sections=("data",)) == []
