"""Where the repository's own files are, for tests in any folder."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
SUPPORT = ROOT / "tests" / "support"
GSM8K = ROOT.parent / "shared" / "data" / "gsm8k" / "train.jsonl"
"""Real questions; a test that needs them is skipped where they are absent."""
