"""Words that the glossary replaces may become fewer in product and docs, never more.

`python tests/test_words.py` lowers the budgets to what is there.
"""

import re
import subprocess
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HERE = Path(__file__).resolve()
BUDGETS = {
    r"draw|draws|drew|drawn|drawing|redraw|redrawn": 1,
    r"fate|fates": 0,
    r"killer|killers": 0,
    r"rival|rivals": 0,
    r"letter|letters": 32,
    r"story": 0,
    r"crew": 0,
    r"told|teller": 0,
    r"course": 0,
    r"lesson": 0,
    r"lend|lends|lent|loan": 0,
    r"anew": 0,
    r"whoever|whatever": 3,
    r"nobody|nobody's": 1,
    r"wish|wishes|wished": 0,
    r"upkeep": 0,
    r"beside": 1,
    r"hopeless": 0,
    r"undecided": 0,
    r"standing|scene": 3,
    r"outlet|inlet": 0,
    r"begin_offsets": 0,
    r"found": 69,
    r"wanted": 3,
    r"known": 28,
    r"kept": 23,
    r"given": 3,
    r"place|places": 54,
    r"says|said|say": 19,
    r"asks|asked|ask": 23,
    r"answer|answers|answered": 228,
    r"dies|died|die|dead": 2,
    r"judge|judged|judges": 2,
    r"stood|stands": 0,
    r"begins|began|begin": 34,
    r"the rule:": 0,
    r"given? up|gives up|gave up": 0,
    r"set(s)? aside|put aside": 0,
    r"pass(es|ed)? over": 0,
    r"in hand": 0,
    r"\bside by side\b": 1,
    r"(goes|went|go) on\b": 0,
    r"(broker|kafka) (is|goes|was) away": 0,
    r"once more": 0,
    r"now and then": 0,
}
"""Pattern of a lower-case word, or of a phrase with a space -> most uses in product and docs."""
NOT_OURS = ("CHANGELOG.md", "htmx.js", "uplot.js")
PHRASE = re.compile("[ _]")


def uses() -> Counter[str]:
    """Pattern -> uses, in whole words and in parts of identifiers; `dead letter` is Kafka's own term."""
    listed = subprocess.run(
        ["git", "ls-files", "*.py", "*.md", "*.toml", "*.html", "*.js"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    counts, words = Counter[str](), Counter[str]()
    for name in listed.stdout.split():
        path = ROOT / name
        if name.startswith(("tests/", "benchmarks/")) or path.is_symlink() or not path.exists() or path.name in NOT_OURS:
            continue
        text = re.sub(r"(?i)dead[-_ ]?letters?", "", path.read_text(encoding="utf-8"))
        words.update(re.findall(r"[a-z']+", re.sub(r"([a-z])([A-Z])", r"\1 \2", text).lower()))
        counts.update({pattern: len(re.findall(pattern, text.lower())) for pattern in BUDGETS if PHRASE.search(pattern)})
    for pattern in BUDGETS:
        if not PHRASE.search(pattern):
            counts[pattern] = sum(count for word, count in words.items() if re.fullmatch(pattern, word))
    return counts


def test_words_that_the_glossary_replaces_become_fewer() -> None:
    counts = uses()
    assert {pattern: counts[pattern] for pattern, budget in BUDGETS.items() if counts[pattern] > budget} == {}


if __name__ == "__main__":
    source, counts = HERE.read_text(encoding="utf-8"), uses()
    for pattern, budget in BUDGETS.items():
        source = source.replace(f'r"{pattern}": {budget},', f'r"{pattern}": {min(budget, counts[pattern])},')
    HERE.write_text(source, encoding="utf-8")
