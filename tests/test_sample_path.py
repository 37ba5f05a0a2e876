"""One sample's way from prompt to gradient, followed in a real run of one step and compared with the list in the documentation.

A file is on the way if one of its functions is called with the sample, its id or its group: see `benchmarks/support/sample_path.py`.
"""

import re

import pytest

from benchmarks.support.command import ROOT
from benchmarks.support.sample_path import observe

PAGE = ROOT / "docs" / "explanation" / "how-a-run-works.md"
MOST_FILES = 41
MOST_ROOMS = 16


def listed() -> list[str]:
    """The files that the page names, in its order."""
    section = PAGE.read_text(encoding="utf-8").split("\n## The way of a sample\n")[1].split("\n## ")[0]
    return re.findall(r"\]\(\.\./\.\./([\w/]+\.py)\)", section)


def room(file: str) -> str:
    """The subject or role that a file belongs to: `topics`, or a folder of `infra/`, `pipeline/` or `workers/`."""
    return "topics" if file.startswith("topics/") else "/".join(file.split("/")[:-1][:2])


def test_a_sample_passes_few_files_in_few_folders() -> None:
    files = listed()
    assert len(files) == len(set(files)) <= MOST_FILES
    assert len({room(file) for file in files}) <= MOST_ROOMS


@pytest.mark.slow
def test_the_page_names_the_files_that_a_sample_passes(broker: str) -> None:
    assert sorted(listed()) == sorted(observe(broker))
