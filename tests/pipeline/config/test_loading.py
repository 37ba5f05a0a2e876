"""Loading a configuration: what cannot be resolved or read is refused with its key."""

from pathlib import Path

import pytest

from penstock.infra.errors import ConfigError
from penstock.pipeline.config.load import load

BASE = {"run": "steps = 1", "model": 'path = "m"', "data": 'source = "rows.jsonl"'}


@pytest.mark.parametrize(
    ("section", "line", "said"),
    [
        ("model", 'path = "a\\u0000b"', "model.path: 'a\\\\x00b' is not a path: embedded null byte"),
        ("model", 'path = "~no_such_user/m"', "model.path: '~no_such_user/m' is not a path: Could not determine home directory"),
        ("data", 'source = "a/b\\u0000.jsonl"', "data.source: 'a/b\\\\x00.jsonl' is not a path: embedded null byte"),
        ("model", 'path = "' + "x" * 300 + '"', "model.path: 'x{80}' is not a path: the file name x{40}… has 300 bytes, limit 255"),
        ("kafka", "security = 7", "kafka.security = 7: kafka.security is a section; write \\[kafka.security\\] with its keys below it"),
        ("kafka", 'security = "x"', "kafka.security = 'x': kafka.security is a section; write \\[kafka.security\\] with its keys below it"),
        ("mlflow", 'tracking_uri = "http://["', "mlflow.tracking_uri = 'http://\\[': Invalid IPv6 URL"),
    ],
)
def test_a_value_that_cannot_be_resolved_is_named_with_its_key(tmp_path: Path, section: str, line: str, said: str) -> None:
    table = {**BASE, section: line}
    (tmp_path / "config.toml").write_text("".join(f"[{name}]\n{text}\n" for name, text in table.items()))
    with pytest.raises(ConfigError, match=f"^{said}"):
        load(tmp_path / "config.toml")
