"""The model card: what Hugging Face's parser reads, hostile text, files that were there, and proofs that leave other prompts unknown."""

import json
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard
from markdown_it import MarkdownIt

from penstock.infra.errors import ConfigError, LogError
from penstock.pipeline.cli.runs import card as card_command
from penstock.pipeline.inspect.report import inclusion, provenance
from penstock.pipeline.inspect.report.card import MARK, card, code, licence_of
from penstock.pipeline.inspect.report.inclusion import InvalidProof, Leaf, leaves
from penstock.pipeline.inspect.report.provenance import log_claims, public, read_chain, read_published
from penstock.pipeline.runtime.topic_reader import RunReader
from penstock.topics import ledger
from penstock.topics.ledger import Entry
from tests.support.a_run import RUN, RecordBuilder
from tests.support.page_records import log_with

AUDIT = {"clean": True, "closed": True, "summary": "audit: clean", "notes": [], "violations": {}}
HOSTILE = "a`|\\|``</code><script>alert(1)</script>\n---\nlicense: evil\n---\n# Owned\n[x](http://evil)\u202e\n```\n<!--"
SECRET = b"s" * 32


def facts_of(text: str = "gsm8k", *, licence: str | None = None) -> dict[str, Any]:
    """The predicate of a small run whose names are this text."""
    built = RecordBuilder(steps=4, config={"reward": {"functions": ["exact_match"]}, "model": {"path": f"/models/{text}"}})
    source = {"rows": 64, "digest": "d" * 64}
    built.info |= {
        "data": [{"name": text, "source": f"hf:openai/{text}", "context": context, **source} for context in ("training", "evaluation")],
        "reward_sources": {text: "0" * 64},
        "code": {f"algorithm.loss /home/me/{text}": "1" * 64},
        "changes": [{"what": text, "before": text, "after": text, "time_ns": 0}],
    }
    log = log_with(built.whole())
    given = {"audit": {**AUDIT, "notes": [text]}, "licences": {"model": licence, "data": [licence or "mit"] * 2}, "topics": {}}
    return log_claims(read_published(log, RUN), SECRET) | given


def test_hugging_face_reads_base_data_and_evaluations_with_intervals() -> None:
    facts = facts_of(licence="apache-2.0")
    facts["evaluations"][-1] |= {"greedy_accuracy": 0.5, "greedy_low": 0.4, "greedy_high": 0.6}
    data = ModelCard(card(facts)).data
    assert (data.license, data.datasets, data.pipeline_tag) == ("apache-2.0", ["openai/gsm8k"], "text-generation")
    assert data.provenance["datasets"][0] == {"name": "hf:openai/gsm8k", "digest": "d" * 64, "licence": "apache-2.0"}
    assert data.provenance["ledger"] == facts["ledger"]
    greedy = data.eval_results[0]
    assert (greedy.dataset_type, greedy.metric_value, greedy.metric_args["interval_95"]) == ("openai/gsm8k", 0.5, [0.4, 0.6])


def test_hostile_text_is_neither_markup_nor_metadata() -> None:
    text = card(facts_of(HOSTILE, licence=HOSTILE))
    data, body = ModelCard(text).data, ModelCard(text).text
    assert set(data.to_dict()) == set(ModelCard(card(facts_of(licence="mit"))).data.to_dict()) - {"datasets"}
    assert data.license.startswith("a`|") and "\n" not in data.license
    tokens = MarkdownIt("commonmark").enable("table").parse(body)
    inline = [child for token in tokens for child in token.children or ()]
    assert [token.content.strip() for token in tokens if token.type == "html_block"] == [MARK]
    assert not {"html_inline", "link_open", "image"} & {child.type for child in inline}
    headings = [after.content for token, after in pairwise(tokens) if token.type == "heading_open"]
    assert headings[0] == f"Model of run `{RUN}`" and not any("Owned" in heading for heading in headings)
    row = f"| {code(HOSTILE)} | after |\n"
    cells = [token.content for token in MarkdownIt("commonmark").enable("table").parse(f"|a|b|\n|-|-|\n{row}") if token.type == "inline"]
    assert cells == ["a", "b", code(HOSTILE), "after"]


def test_folders_and_passwords_of_a_machine_are_not_published() -> None:
    values = ["/home/me/my data/r.py:f", "algorithm.loss ../x/loss.py:g", "hf:openai/gsm8k", "https://me:pw@host/score", 0.5]
    assert [public(value) for value in values] == ["r.py:f", "algorithm.loss loss.py:g", "hf:openai/gsm8k", "https://host/score", 0.5]
    assert "/home/me" not in json.dumps(facts_of())


def test_a_repetition_writes_the_same_bytes_and_another_readme_stays(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\n# Base model\n")
    assert licence_of(tmp_path) == "mit"
    facts, notes = facts_of(), list[str]()
    text = card(facts)

    def files() -> dict[str, bytes]:
        provenance.publish(tmp_path, text, facts, notify=notes.append)
        return {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    first = files()
    assert first["README.previous.md"].endswith(b"# Base model\n") and len(notes) == 1
    (tmp_path / provenance.STATEMENT).unlink()  # as if killed between the two files
    assert files() == files() == first
    statement = provenance.read_statement(tmp_path)
    assert [each["name"] for each in statement["subject"]] == ["README.md", "README.previous.md", "model.safetensors"]
    (tmp_path / "README.md").write_text(text + "edited")
    assert files()["README.previous-1.md"].endswith(b"edited") and len(notes) == 2


def test_a_run_without_a_ledger_entry_has_no_card() -> None:
    built = RecordBuilder()
    with pytest.raises(LogError, match="no entry yet"):
        read_published(log_with([built.made(), built.record()]), RUN)


def test_a_signature_without_the_package_is_refused_before_the_run_is_read() -> None:
    if find_spec("model_signing") is not None:
        pytest.skip("model-signing is installed")
    with pytest.raises(ConfigError, match="pip install model-signing"):
        card_command("no-such-run", sign=Path("key.pem"))


def leaf_of(group: int, prompt: str) -> Leaf:
    return Leaf(group, 0, f"{group:064x}", prompt)


def test_a_short_prompt_is_guessed_from_a_plain_leaf_but_not_from_a_salted_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proof shows the sibling of its leaf; with the plans, all sums can be tried."""

    def guessed() -> list[str]:
        path = inclusion._climb([leaf.digest(leaf.salt(SECRET)) for leaf in (leaf_of(0, "1+1="), leaf_of(1, "7+5="))], 0)[1]
        tries = [f"{a}+{b}=" for a in range(10) for b in range(10)]
        return [prompt for prompt in tries for salt in (b"", leaf_of(0, "").salt(SECRET)) if sibling_is(path, leaf_of(1, prompt), salt)]

    def sibling_is(path: list[tuple[str, str]], leaf: Leaf, salt: bytes) -> bool:
        return leaf.digest(salt).hex() == path[0][1]

    assert guessed() == []
    monkeypatch.setattr(Leaf, "salt", lambda *_: b"")
    assert set(guessed()) == {"7+5="}


@pytest.mark.parametrize("count", [1, 2, 3, 7, 8])
def test_every_leaf_of_a_tree_has_a_path_to_its_root(count: int) -> None:
    tree = [leaf_of(group, f"{group}=") for group in range(count)]
    for index, leaf in enumerate(tree):
        top, path = inclusion._climb([each.digest(each.salt(SECRET)) for each in tree], index)
        assert top == inclusion.root(tree, SECRET)
        inclusion._check_path(leaf.digest(leaf.salt(SECRET)), path, top)


def chained() -> tuple[inclusion.Chain, dict[int, str]]:
    """The ledger of a small run whose entries have digests of their predecessors."""
    chain: list[tuple[Entry, bytes]] = []
    for entry, _ in read_chain(RunReader(log_with(RecordBuilder(steps=4).whole()), RUN)):
        linked = replace(entry, previous=ledger.digest(chain[-1][1]) if chain else None)
        chain.append((linked, ledger.encode(linked)))
    return chain, {planned.group: f"{planned.group}+1=" for entry, _ in chain for planned in entry.plan}


def another_digest(text: str) -> str:
    return text.translate(str.maketrans("0123456789abcdef", "123456789abcdef0"))


CHANGES: dict[str, Callable[[dict[str, Any]], None]] = {
    "the prompt": lambda proof: proof["leaf"].update(prompt="9+9="),
    "the step": lambda proof: proof["leaf"].update(step=2),
    "the salt": lambda proof: proof.update(salt=another_digest(proof["salt"])),
    "a sibling": lambda proof: proof["path"].reverse(),
    "the root": lambda proof: proof.update(root=another_digest(proof["root"])),
    "the head": lambda proof: proof["ledger"].update(head=another_digest(proof["ledger"]["head"])),
    "the number of entries": lambda proof: proof["ledger"].update(entries=3),
    "an entry that is missing": lambda proof: proof["entries"].pop(1),
    "an entry that is another's": lambda proof: proof["entries"].__setitem__(1, proof["entries"][2]),
    "no entries": lambda proof: proof.update(entries=[]),
    "a record that is none": lambda proof: proof.update(record=["AAAA"]),
    "a missing key": lambda proof: proof.pop("leaf"),
    "another type": lambda proof: proof.update(_type="x"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_proof_shows_its_prompt_and_no_other_and_every_change_is_refused(change: Callable[[dict[str, Any]], None]) -> None:
    chain, prompts = chained()
    tree = leaves(chain, prompts)
    proof = json.loads(json.dumps(inclusion.prove(RUN, tree[3].group, chain, tree, SECRET)))
    shown = inclusion.check(proof)
    assert (shown.group, shown.prompt, shown.root) == (tree[3].group, tree[3].prompt, inclusion.root(tree, SECRET))
    assert [prompt for prompt in prompts.values() if prompt in json.dumps(proof)] == [tree[3].prompt]
    change(proof)
    with pytest.raises(InvalidProof):
        inclusion.check(proof)
