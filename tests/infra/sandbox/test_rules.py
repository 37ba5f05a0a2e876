"""Which environment variables children get, and what other processes of the user can read of this one's."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.infra.sandbox.spawn import child_environment
from penstock.pipeline.config.load import ConfigError
from tests.support.children import child
from tests.support.least_config import least_config

SECRETS = {
    "HF_TOKEN": "x",
    "WANDB_API_KEY": "x",
    "MLFLOW_TRACKING_PASSWORD": "x",
    "AWS_SECRET_ACCESS_KEY": "x",
    "AWS_ACCESS_KEY_ID": "x",
    "PENSTOCK_SECURITY": '{"sasl_plain_password": "x"}',
    "PENSTOCK_REWARD_TOKEN": "x",
    "OPENAI_API_KEY": "x",
    "MYSQL_PWD": "x",
    "PGPASSFILE": "/etc/passwd",
    "SSH_AUTH_SOCK": "/tmp",
    "GOOGLE_APPLICATION_CREDENTIALS": "/etc/passwd",
    "KAGGLE_KEY": "x",
    "hf_token": "x",
    "DATABASE_URL": "postgres://me:x@db/runs",
    "HTTPS_PROXY": "http://me:x@proxy:3128",
    "SLACK_WEBHOOK": "https://hooks.example/T0/B0/x",
    "GH_PAT": "x",
    "SLASHED": "/x9bW4kPq0",
    "SLASHES": "/x9b/W4k/Pq0",
}
PUBLIC = {
    "PATH": "/bin",
    "HOME": "/root",
    "LANG": "C.UTF-8",
    "LC_ALL": "C",
    "OMP_NUM_THREADS": "2",
    "CUDA_VISIBLE_DEVICES": "0",
    "NVIDIA_VISIBLE_DEVICES": "all",
    "HF_HOME": "/hf",
    "HF_HUB_OFFLINE": "1",
    "PYTHONPATH": "/a:/b",
    "LD_LIBRARY_PATH": "/opt",
    "XDG_CACHE_HOME": "/c",
    "TOKENIZERS_PARALLELISM": "false",
    "http_proxy": "http://proxy:3128",
    "no_proxy": "127.0.0.1",
    "MY_DATA": "/usr/lib",
    "MY_NEW_FILE": "/tmp/not-written-yet.json",
}


@pytest.mark.parametrize("name", SECRETS)
def test_a_secret_does_not_pass_unless_it_is_named(name: str):
    assert child_environment({name: SECRETS[name]}) == {}
    assert child_environment(SECRETS, [name]) == {name: SECRETS[name]}


@pytest.mark.parametrize("name", PUBLIC)
def test_what_programs_need_and_paths_pass(name: str):
    assert child_environment({**SECRETS, name: PUBLIC[name]}) == {name: PUBLIC[name]}


@pytest.mark.parametrize("section", ["reward", "environment"])
def test_the_names_to_pass_are_keys_of_the_section(section: str):
    config = least_config(**{section: {"pass_env": ["MY_KEY"]}})
    assert getattr(config, section).rules().pass_env == ("MY_KEY",)
    with pytest.raises(ConfigError, match=rf"{section}\.pass_env"):
        least_config(**{section: {"pass_env": ["MY KEY"]}})


@pytest.mark.parametrize(("function", "passed"), [("http://judge/helpful", ("PENSTOCK_REWARD_TOKEN",)), ("exact_match", ())])
def test_the_token_of_reward_services_is_for_services(function: str, passed: tuple[str, ...]):
    config = least_config(reward={"functions": [function]})
    assert config.reward.rules().pass_env == passed


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_after_hiding_no_secret_is_in_proc_while_the_process_and_its_programs_have_it():
    code = (
        "import os, subprocess\n"
        "from penstock.infra.sandbox.secrets import hide_secrets\n"
        "hide_secrets()\n"
        "os.environ.pop('PENSTOCK_SECURITY')\n"
        "assert os.environ['HF_TOKEN'] == 'hunter2'\n"
        "assert subprocess.run(['printenv', 'HF_TOKEN'], capture_output=True).stdout == b'hunter2\\n'\n"
        "print('ready', flush=True)\n"
        "input()\n"
    )
    environment = {**os.environ, "HF_TOKEN": "hunter2", "PENSTOCK_SECURITY": "hunter2", "ODD": "hunter2", "EMPTY": "", "TZ": "UTC"}
    with child([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        owner = Path(f"/proc/{process.pid}/environ").stat().st_uid
        if os.geteuid() == 0:  # others cannot even open it
            assert owner == 0
            variables = Path(f"/proc/{process.pid}/environ").read_bytes()
            assert b"hunter2" not in variables
            assert b"\0TZ=UTC\0" in b"\0" + variables
        else:
            assert owner != os.geteuid()
        process.stdin.close()
