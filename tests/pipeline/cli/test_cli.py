"""The command line: exit statuses, one-line errors, JSON on stdout alone, and an answer to --help at once."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from decimal import Decimal
from importlib.util import find_spec
from pathlib import Path

import pytest

from penstock.pipeline import cli
from penstock.pipeline.archive import sql
from penstock.pipeline.cli import app, machine
from penstock.pipeline.cli.app import FAILED, INTERRUPTED, OK, USAGE
from penstock.pipeline.config.load import ConfigError
from penstock.pipeline.config.security import credentials, security_settings
from penstock.pipeline.runtime.main import parsed
from tests.support.light_model import light_model
from tests.support.paths import ROOT

EXAMPLES = sorted((ROOT / "examples").glob("*.toml"))
PENSTOCK = [sys.executable, "-c", "import sys; from penstock.pipeline.cli import main; sys.exit(main())"]


def config(tmp_path: Path, **sections: str) -> str:
    parts = {"run": "steps = 2", "model": f'path = "{tmp_path}"', "data": 'source = "tiny:successor"', **sections}
    file = tmp_path / "run.toml"
    file.write_text("\n".join(f"[{name}]\n{text}" for name, text in parts.items()), encoding="utf-8")
    return str(file)


def last_line(capsys: pytest.CaptureFixture[str]) -> str:
    """The error that was printed, which is one line."""
    lines = capsys.readouterr().err.splitlines()
    assert lines, "nothing was said"
    return lines[-1]


def child_ended(command: list[str], **environment: str) -> "subprocess.CompletedProcess[str]":
    """The command, once it has ended, with these variables beside the environment's."""
    return subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=180, check=False)


def test_help_loads_neither_the_configuration_nor_arrow_nor_kafka() -> None:
    code = """
import sys
from penstock.pipeline.cli import main
main(["--help"])
loaded = [name for name in ("pydantic", "pyarrow", "kafka", "torch", "rich.live") if name in sys.modules]
assert not loaded, loaded
"""
    done = child_ended([sys.executable, "-c", code])
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", [["runs"], ["status", "a"], ["report", "a"], ["explain", "a", "1"]], ids=lambda command: command[0])
def test_a_command_that_shows_a_run_loads_no_library_for_files_templates_or_sql(command: list[str], tmp_path: Path) -> None:
    code = f"""
import sys
from penstock.pipeline.cli import main
assert main({command}) == 1
assert "penstock.infra.kafka.log" in sys.modules
needless = ("pyarrow.parquet", "pyarrow.compute", "jinja2", "duckdb", "confluent_kafka", "tokenizers", "torch", "starlette", "asyncio")
loaded = [name for name in needless if name in sys.modules]
assert not loaded, loaded
"""
    done = child_ended([sys.executable, "-c", code], PENSTOCK_HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "the broker of this machine is not running" in done.stderr


@pytest.mark.parametrize(
    ("line", "words"), [("penstock st", ["stop", "status"]), ("penstock status --fo", ["--follow"]), ("penstock runs r", ["rm"])]
)
def test_a_shell_completes_commands_and_options_by_the_script_that_show_completion_prints(line: str, words: list[str]) -> None:
    done = child_ended(PENSTOCK, _PENSTOCK_COMPLETE="complete_bash", COMP_WORDS=line, COMP_CWORD=str(line.count(" ")))
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, words, "")


COMMANDS = ["init", "check", "run", "create", "worker", "runs", "status", "report", "audit", "explain", "graph", "doctor"]
COMMANDS += ["topics list", "topics tail", "topics show", "broker start", "broker run", "broker stop", "broker status", "sbatch"]
COMMANDS += ["model tiny", "replay score"]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself_and_knows_json(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*command.split(), "--help"]) == OK
    shown = capsys.readouterr().out
    assert "sage: penstock " + command in shown
    assert "--json" in shown or command == "worker"  # a worker prints its own log and has no result


def test_a_sum_of_integers_which_duckdb_makes_a_decimal_is_a_number_in_json() -> None:
    assert json.dumps([sql.plain(Decimal(value)) for value in ("14180", "0.5")]) == "[14180, 0.5]"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["runn"], "'runn'"),
        (["run"], "CONFIG"),
        (["worker", "rollout"], "--run"),
        (["worker", "rolout", "--run", "r"], "did you mean 'rollout'?"),
        (["topics", "show", "r", "prompts", "x", "0"], "integer"),
        (["topics"], "penstock topics --help"),
        (["run", "no-such.toml"], "no-such.toml"),
        (["sql", "r", "select 1", "--csv", "--json"], "--csv and --json cannot be combined"),
        (["report", "r", "--html", "/dev/null"], "not a regular file"),
        (["runs", "rm", "--older-than", "soon"], "such as 7d"),
        (["run", f"{ROOT}/examples/own.toml", "--dry-run", "--run-id", "My_Run"], "characters of a-z, 0-9 and -"),
    ],
)
def test_wrong_usage_is_one_line_and_status_2(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == USAGE
    captured = capsys.readouterr()
    assert (captured.out, len(captured.err.splitlines())) == ("", 1)
    assert captured.err.startswith("penstock: ") and said in captured.err


def test_an_unknown_key_is_named_with_the_nearest_and_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", config(tmp_path, schedule="prompts_per_stp = 3"), "--dry-run"]) == USAGE
    assert "schedule.prompts_per_stp = 3" in (line := last_line(capsys)) and "schedule.prompts_per_step" in line


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.parametrize(
    ("vllm", "head_dim", "said"),
    [
        ("tensor_paralel_size = 2", 32, "did you mean tensor_parallel_size?"),
        ("kv_cache_memory_bytes = 1000", 32, "set at least 73728, or lower data.max_prompt_tokens or sampling.max_new_tokens"),
        ("", 16, "head_dim 16, but vLLM's CPU attention supports only 32, 64,"),
    ],
    ids=["an argument that vLLM does not have", "too little memory for its KV cache", "a head size that vLLM does not have"],
)
def test_a_vllm_engine_that_cannot_be_made_is_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], vllm: str, head_dim: int, said: str
) -> None:
    sizes = {"num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 64, "head_dim": head_dim}
    (tmp_path / "config.json").write_text(json.dumps({**sizes, "max_position_embeddings": 256}))
    sections = {"rollout": 'engine = "vllm"\n[rollout.vllm]\n' + vllm, "sampling": "max_new_tokens = 16"}
    file = config(tmp_path, model=f'path = "{tmp_path}"', **sections)
    assert cli.main(["run", file, "--set", "data.max_prompt_tokens=32"]) == USAGE
    assert said in last_line(capsys)


def test_a_missing_model_directory_is_a_usage_error_of_one_line(tmp_path: Path, broker: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = config(tmp_path, model=f'path = "{tmp_path}/nowhere"', kafka=f'bootstrap = "{broker}"')
    assert cli.main(["create", file]) == USAGE
    assert "nowhere" in last_line(capsys)


def test_a_malformed_address_is_a_usage_error_of_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["runs", "--bootstrap", "nowhere"], ["create", config(tmp_path, kafka='bootstrap = "nowhere"')]):
        assert cli.main(command) == USAGE
        assert last_line(capsys).endswith("kafka.bootstrap is 'nowhere', expected HOST:PORT[,HOST:PORT...]")


def test_an_unreachable_broker_is_one_line_and_status_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["runs", "--bootstrap", "127.0.0.1:1"]) == FAILED
    line = last_line(capsys)
    assert "127.0.0.1:1" in line and "penstock broker start" in line
    assert cli.main(["create", config(tmp_path, kafka='bootstrap = "127.0.0.1:1"')]) == FAILED


def test_an_unwritable_state_directory_is_one_line_and_status_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path / "file" / "home"))
    assert cli.main(["broker", "start"]) == FAILED
    assert "PENSTOCK_HOME" in last_line(capsys)


def test_a_port_in_use_is_one_line_and_status_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path / "home"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert cli.main(["broker", "start", "--port", str(port)]) == FAILED
    line = last_line(capsys)
    assert f"port {port} " in line and "--port" in line


def test_a_worker_is_not_left_waiting_for_a_run_id_that_cannot_be(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["worker", "feeder", "--run", "Not_An_Id", "--bootstrap", "127.0.0.1:1"]) == USAGE
    assert "'Not_An_Id'" in last_line(capsys)


def test_a_configuration_in_another_encoding_is_named_with_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = Path(config(tmp_path))
    lines = file.read_bytes().count(b"\n")
    file.write_bytes(file.read_bytes() + b"\n# caf\xe9\n")
    assert cli.main(["run", str(file), "--dry-run"]) == USAGE
    assert f"{file}:{lines + 2}: not UTF-8 text (byte 0xe9)" in last_line(capsys)


def test_a_key_of_another_section_is_named_where_it_belongs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", config(tmp_path, trainer="steps = 3"), "--dry-run"]) == USAGE
    assert "'run.steps'" in last_line(capsys)


def test_a_dry_run_of_unreadable_data_names_the_file_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = light_model(tmp_path / "model")
    data = 'source = "/nowhere/questions.jsonl"\nlimit = 64'
    assert cli.main(["run", config(tmp_path, run="epochs = 1", model=f'path = "{model}"', data=data), "--dry-run"]) == USAGE
    captured = capsys.readouterr()
    assert captured.out == "" and "/nowhere/questions.jsonl" in captured.err.splitlines()[-1]


def failing(error: BaseException) -> Callable[..., None]:
    """A stand-in for a command's work that ends in `error`."""

    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


def test_an_unexpected_error_is_one_line_that_points_to_debug(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(machine, "_show", failing(KeyError("offset")))
    assert cli.main(["broker", "status"]) == FAILED
    line = last_line(capsys)
    assert "KeyError" in line and "--debug" in line
    assert cli.main(["broker", "status", "--debug"]) == FAILED
    assert "Traceback" in capsys.readouterr().err


def test_ctrl_c_ends_with_130_and_no_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(machine, "_show", failing(KeyboardInterrupt()))
    assert cli.main(["broker", "status"]) == INTERRUPTED
    assert "Traceback" not in capsys.readouterr().err


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    command = " ".join(f"'{word}'" for word in PENSTOCK)
    done = child_ended(["bash", "-o", "pipefail", "-c", f"{command} graph | true"])
    assert (done.returncode, done.stderr) == (OK, "")


def test_a_command_of_another_name_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["resume", "latest"]) == USAGE
    assert "That is `penstock run --resume RUN`." in last_line(capsys)
    assert cli.main(["ls"]) == USAGE
    assert last_line(capsys) == "penstock: No such command 'ls'. That is `penstock runs`. (see `penstock --help`)"
    for meant in app.SYNONYMS.values():
        assert cli.main([*meant.split()[:1], "--help"]) == OK


def test_the_list_of_views_fits_80_columns_and_ends_without_a_word_on_stderr() -> None:
    console = "import sys; from penstock.pipeline.cli import console; sys.argv = ['penstock', 'sql', 'latest']; sys.exit(console())"
    done = child_ended([sys.executable, "-c", console], COLUMNS="80")
    assert (done.returncode, done.stderr) == (OK, "")
    assert "samples: group_id BIGINT" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_a_message_of_many_lines_becomes_one() -> None:
    assert app.explain(ValueError("first\n  second")) == ("first second", FAILED)


def test_json_is_all_that_stdout_gets(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["broker", "status", "--json"]) == OK
    found = json.loads(capsys.readouterr().out)
    assert {"bootstrap", "pid", "running"} <= set(found)
    assert cli.main(["graph", "--json"]) == OK
    assert {"feeder", "trainer"} <= {role["role"] for role in json.loads(capsys.readouterr().out)}


def test_a_dry_run_prints_the_arithmetic_and_starts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "home"
    monkeypatch.setenv("PENSTOCK_HOME", str(home))
    file = config(tmp_path, model=f'path = "{light_model(tmp_path / "model")}"', data='source = "tiny:successor"\nsize = 20')
    arguments = ["run", file, "--dry-run", "--set", "schedule.prompts_per_step=4", "--set", "schedule.samples_per_prompt=6"]
    assert cli.main(arguments) == OK
    assert "4 prompts x 6 samples = 24 samples" in capsys.readouterr().out
    assert cli.main([*arguments, "--json"]) == OK
    assert "24 samples" in json.loads(capsys.readouterr().out)["one step"]
    assert not home.exists()


assert EXAMPLES
TINY = [file.name for file in EXAMPLES if ".penstock/tiny" in file.read_text(encoding="utf-8")]


@pytest.mark.costly  # tries the reward in a child process
@pytest.mark.parametrize("name", TINY)
def test_an_example_of_the_tiny_model_passes_a_dry_run(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if find_spec("vllm") is None and 'engine = "vllm"' in (ROOT / "examples" / name).read_text(encoding="utf-8"):
        pytest.skip("vLLM is not installed")
    model = light_model(tmp_path / "model", context=2048)
    status = cli.main(["run", str(ROOT / "examples" / name), "--dry-run", "--json", "--set", f"model.path={model}"])
    captured = capsys.readouterr()
    assert status == OK, captured.err
    found = json.loads(captured.out)
    assert {"one step", "the run", "reward"} <= found.keys() and found["samples"] == []


@pytest.mark.parametrize("name", sorted({file.name for file in EXAMPLES} - set(TINY)))
def test_an_example_of_another_model_says_what_it_needs(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", str(ROOT / "examples" / name), "--dry-run", "--set", f"model.path={tmp_path}/org/none"]) in (FAILED, USAGE)
    line = last_line(capsys)
    assert "of the hub write hf:" in line or "GPUs are required" in line


def test_only_a_command_that_resumes_speaks_of_resuming(capsys: pytest.CaptureFixture[str]) -> None:
    for command, resumes in (("run", True), ("check", False), ("create", False)):
        assert cli.main([command, "--help"]) == OK
        assert ("--resume" in capsys.readouterr().out) == resumes


def test_both_entries_of_a_worker_have_the_same_options(capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for prog in ("penstock worker", "python -m penstock.workers"):
        with pytest.raises(SystemExit):
            parsed(["--help"], prog=prog)
        texts.append(capsys.readouterr().out.partition("options:")[2])
    assert texts[0] == texts[1]
    assert all(option in texts[0] for option in ("--security", "--bootstrap", "--debug", "--health", "--trust-code"))


def test_security_settings_come_from_words_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_SECURITY", '{"sasl_plain_username": "ann", "sasl_mechanism": "PLAIN"}')
    given = security_settings(["sasl_mechanism=SCRAM-SHA-512"])
    assert credentials(given) == {"sasl_plain_username": "ann", "sasl_mechanism": "SCRAM-SHA-512"}
    with pytest.raises(ConfigError, match="KEY=VALUE"):
        security_settings(["nonsense"])
    monkeypatch.setenv("PENSTOCK_PASSWORD", 'a"b\\ $(c)\r\n')
    assert credentials({})["sasl_plain_password"] == 'a"b\\ $(c)'
    monkeypatch.setenv("PENSTOCK_SECURITY", '{"sasl_plain_password": "own"}')
    assert credentials({}) == {"sasl_plain_password": "own"}
    monkeypatch.setenv("PENSTOCK_SECURITY", "hush")
    with pytest.raises(ConfigError, match="PENSTOCK_SECURITY is not JSON"):
        credentials({})


@pytest.mark.parametrize(
    "words",
    [
        ["status", "latest", "--security", "sasl_plain_password=hush"],
        ["run", "CONFIG", "--dry-run", "--set", "kafka.security.ssl_password=hush"],
        ["run", "CONFIG", "--dry-run", "--set", "mlflow.tracking_uri=https://me:hush@host/"],
    ],
)
def test_a_password_on_the_command_line_or_in_the_configuration_is_refused_unsaid(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([config(tmp_path) if word == "CONFIG" else word for word in words]) == USAGE
    records = capsys.readouterr().err
    assert records.count("\n") == 1
    assert ("PENSTOCK_SECURITY" in records) or ("MLFLOW_TRACKING_PASSWORD" in records)
    assert "hush" not in records


def test_the_version_is_that_of_the_wheel() -> None:
    done = child_ended([*PENSTOCK, "--version"])
    if done.returncode:
        pytest.skip("the wheel is not installed in this environment")
    assert done.stdout.startswith("penstock ")


def test_the_help_lists_every_command_under_a_heading_with_a_text_that_is_not_cut(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["-h"]) == OK
    said = capsys.readouterr().out
    commands = [line for line in said.partition("\nTrain:\n")[2].splitlines() if line.startswith("  ")]
    assert {"run", "explain", "replay", "doctor"} <= {line.split()[0] for line in commands}
    assert [line for line in commands if len(line.split()) < 4 or not line.endswith(".") or line.endswith("...") or len(line) > 80] == []
