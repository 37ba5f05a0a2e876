"""What is installed: pinned packages and jars, and never the package index's own `penstock`, which is another project."""

import json
import re
import subprocess
import sys

import pytest

from tests.support.paths import ROOT

STRANGER = re.compile(
    r"\b(pip3?|pipx|poetry|conda|uvx|uv (add|tool (run|install)))\b[^\n|]*[\s'\"]penstock(-rl)?(\[|==|['\"`\s]|$)"
    r"|[\"'`\s]penstock\[[a-z]"
)


@pytest.mark.parametrize(
    "text",
    [
        "pip install penstock",
        "uv pip install 'penstock[data]'",
        'pip install "penstock-rl[sql]"',
        "python -m pip install --upgrade penstock==1.0",
        "uv add penstock",
        "pipx install penstock",
        "install `penstock[trainer]`",
    ],
)
def test_a_command_that_fetches_a_package_of_that_name_is_recognised(text: str) -> None:
    assert STRANGER.search(text)


def test_no_text_has_a_command_that_fetches_a_package_of_that_name() -> None:
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    files = [ROOT / name for name in names if name.endswith((".py", ".md", ".toml", ".ipynb", "Makefile", ".sh", ".in"))]
    lines = [
        f"{file.relative_to(ROOT)}: {line.strip()}"
        for file in files
        if file.is_file() and file.name != "test_supply_chain.py"
        for line in file.read_text(encoding="utf-8").splitlines()
        if STRANGER.search(line)
    ]
    assert lines == []


@pytest.mark.parametrize("lock", ["requirements.lock", "requirements-gpu.lock"])
def test_the_bill_of_materials_has_every_pinned_package_and_jar_with_its_digest(lock: str) -> None:
    made = subprocess.run([sys.executable, str(ROOT / ".ci/sbom.py"), lock], capture_output=True, text=True, check=True).stdout
    components = json.loads(made)["components"]
    pins = re.findall(r"^[a-z0-9][^=\s]*==", (ROOT / lock).read_text(), re.MULTILINE)
    jars = (ROOT / "infra/broker/jars.sha256").read_text().splitlines()
    assert len(components) == len(pins) + len(jars)
    assert all(part["hashes"] and part["version"] for part in components)
    assert "pkg:maven/org.apache.kafka/kafka-clients@4.3.1" in {part["purl"] for part in components}
