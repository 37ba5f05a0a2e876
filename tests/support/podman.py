"""Podman with images, containers and volumes of a test's own: none of them is left, and none of the user's is touched."""

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.support.paths import ROOT

LOCKED = (
    "--read-only",
    "--tmpfs=/tmp:noexec",
    "--cap-drop=ALL",
    "--security-opt=no-new-privileges",
    "--network=host",
    "--env=OMP_NUM_THREADS=1",
)
"""Options of every container: it may write to its volume and to /tmp only."""
_CERTIFICATES, _CACHE = Path("/etc/ssl/certs"), Path("~/.cache/uv").expanduser()
_CONF = ROOT / "tests" / "deploy" / "containers.conf"


class Podman:
    """Runs `podman` on storage in `folder`."""

    def __init__(self, folder: Path) -> None:
        storage = folder / "storage.conf"
        storage.write_text(
            f'[storage]\ndriver = "overlay"\ngraphroot = "{folder / "graph"}"\nrunroot = "{folder / "run"}"\n', encoding="utf-8"
        )
        sandbox = {"CONTAINERS_CONF": str(_CONF)} if shutil.which("runc") else {}
        self.folder, self.environment = folder, {**os.environ, **sandbox, "CONTAINERS_STORAGE_CONF": str(storage)}

    def __call__(self, *words: str, check: bool = True) -> str:
        """The output of a command; its errors too, if it fails or `check` is false."""
        done = subprocess.run(["podman", *words], env=self.environment, capture_output=True, text=True, timeout=900, check=False)
        assert not check or done.returncode == 0, f"podman {' '.join(words)}: {done.stdout}{done.stderr}"
        return done.stdout if check else done.stdout + done.stderr

    def make(self, *words: str) -> "subprocess.CompletedProcess[str]":
        """Run targets of the Makefile on this storage, with this machine's certificates and downloads."""
        mounts = [f"-v {_CERTIFICATES}:{_CERTIFICATES}:ro"] * _CERTIFICATES.is_dir() + [f"-v {_CACHE}:/var/cache/uv:O"] * _CACHE.is_dir()
        arguments = ["make", "--no-print-directory", *words, "ENGINE=podman", "IMAGE_ARGS=" + " ".join(["--network=host", *mounts])]
        quiet = {name: value for name, value in self.environment.items() if not name.startswith("MAKE")}
        return subprocess.run(arguments, cwd=ROOT, env=quiet, capture_output=True, text=True, timeout=3000, check=False)

    def start(self, name: str, image: str, *command: str, options: Sequence[str] = ()) -> None:
        """Start a container with a volume of its own."""
        self("run", "--detach", f"--name={name}", *LOCKED, f"--volume={name}:/var/lib/penstock", *options, image, *command)

    def once(self, image: str, *command: str, options: Sequence[str] = ()) -> str:
        """The output of a command in a container that is removed."""
        return self("run", "--rm", *LOCKED, *options, image, *command)

    def close(self) -> None:
        """Remove everything."""
        self("rm", "--all", "--force", "--time=0", check=False)
        self("volume", "prune", "--force", check=False)
        self("rmi", "--all", "--force", check=False)
        for line in reversed(Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()):
            if (mount := line.split()[4]).startswith(str(self.folder)):
                subprocess.run(["umount", "--lazy", mount], check=False)
        shutil.rmtree(self.folder)


@contextmanager
def podman(folder: Path) -> Iterator[Podman]:
    """A `Podman` that is removed at the end of the block."""
    folder.mkdir()
    opened = Podman(folder)
    try:
        yield opened
    finally:
        opened.close()
