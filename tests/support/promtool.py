"""What Debian's promtool says of files and metrics."""

import subprocess


def promtool(*words: str, text: str = "") -> str:
    """What promtool says; empty if nothing is wrong and it prints nothing."""
    done = subprocess.run(["promtool", *words], input=text, capture_output=True, text=True, check=False, timeout=120)
    return done.stdout + done.stderr if done.returncode or done.stderr else ""
