"""Kafka's class path: exactly the jars pinned in `jars.sha256`, whose SHA-256 is verified before each use.

Each line of the list is `<sha256>  <path in a Maven repository>`, so `sha256sum -c` reads it too. Jars are stored in the user's Maven cache
($M2_REPO, else ~/.m2/repository). `python -m penstock.infra.broker.jars --pin` resolves the set again and rewrites the list.
PENSTOCK_JARS names a folder with other jars and a `jars.sha256` of its own; it is announced at each start, and nothing is downloaded.
"""

import argparse
import hashlib
import os
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from penstock.infra.errors import BrokerError

KAFKA = "org.apache.kafka:kafka_2.13:4.3.1"
# Without a binding for slf4j 1.7 Kafka logs nothing at all; the version is that of Kafka's own log4j-core.
LOGGING = "org.apache.logging.log4j:log4j-slf4j-impl:2.25.4"
PINS = Path(__file__).with_name("jars.sha256")
OTHER_JARS = "PENSTOCK_JARS"
DOWNLOADS_AT_ONCE = 6
RETRIES_S = (1.0, 4.0)
"""Pauses between the attempts for a jar."""


def class_path(*, progress: Callable[[str], None], pins: Path = PINS, cache: Path | None = None) -> str:
    """Java class path of the pinned jars; downloads those that are not cached. Raises `BrokerError` for a jar with another digest."""
    cache, other = maven_cache() if cache is None else cache, os.environ.get(OTHER_JARS)
    if other:
        pins, cache = Path(other).absolute() / PINS.name, Path(other).absolute()
        progress(f"Kafka's jars are those of {OTHER_JARS}={other}, not the pinned ones")
    pinned = read_pins(pins)
    missing = [path for path in pinned if not (cache / path).exists()]
    if missing and other:
        raise BrokerError(f"{cache} lacks {missing[0]}, which is listed in its {pins.name}: unset {OTHER_JARS}, or add the jar")
    if missing:
        progress(f"downloading Apache Kafka ({len(missing)} of {len(pinned)} jars)")
        _download({path: pinned[path] for path in missing}, cache)
    for path, sha256 in pinned.items():
        if _sha256(cache / path) != sha256:
            raise BrokerError(f"{cache / path} does not have the SHA-256 pinned in {pins.name}: delete that file and start again")
    return os.pathsep.join(str(cache / path) for path in pinned)


def read_pins(pins: Path = PINS) -> dict[str, str]:
    """Return {path in a Maven repository: SHA-256} in the order of the class path."""
    try:
        lines = pins.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise BrokerError(f"cannot read the list of Kafka's jars {pins}: {error.strerror}") from error
    return {path: sha256 for sha256, path in (line.split() for line in lines)}


def maven_cache() -> Path:
    """Path of this user's Maven cache, which jgo uses too."""
    path = os.environ.get("M2_REPO")
    return Path(path).expanduser() if path else Path.home() / ".m2" / "repository"


def _download(digests: dict[str, str], cache: Path) -> None:
    """Download jars next to the cache and move each in once its digest matches: an interrupted download leaves no partial jar."""
    try:
        from jgo.config import GlobalSettings
        from jgo.constants import MAVEN_CENTRAL_URL
        from jgo.maven import MavenContext
    except ImportError:
        raise BrokerError("the embedded broker needs jgo: pip install '.[broker]' in the checkout, or set kafka.bootstrap") from None
    # A mirror named in jgo's settings comes first: without access to Maven Central it is the only source.
    remotes = {**GlobalSettings.load().repositories, "central": MAVEN_CENTRAL_URL}
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix=".penstock-") as staging:
            maven = MavenContext(repo_cache=Path(staging), remote_repos=remotes)

            def fetch(path: str) -> None:
                *group, artifact, version, _ = path.split("/")
                jar = _resolved(lambda: maven.project(".".join(group), artifact).at_version(version).artifact().resolve())
                if _sha256(jar) != digests[path]:
                    raise BrokerError(
                        f"the downloaded {jar.name} does not have the SHA-256 pinned in {PINS.name}: check jgo's repositories"
                    )
                (cache / path).parent.mkdir(parents=True, exist_ok=True)
                jar.replace(cache / path)

            with ThreadPoolExecutor(DOWNLOADS_AT_ONCE) as pool:
                list(pool.map(fetch, digests))
    except (OSError, RuntimeError) as error:  # requests' errors are OSErrors; jgo raises RuntimeError for an unknown artifact
        raise BrokerError(
            f"cannot download Kafka's jars ({type(error).__name__}): connect to the network once, "
            "or set M2_REPO to a Maven cache that contains them, or set kafka.bootstrap to your own broker"
        ) from error


def _resolved(resolve: Callable[[], Path]) -> Path:
    """Download a jar; retried, because one of sixty downloads may break off."""
    for pause_s in RETRIES_S:
        with suppress(OSError):
            return resolve()
        time.sleep(pause_s)
    return resolve()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def pin(pins: Path = PINS) -> int:
    """Resolve the jars of Kafka and of its logging with jgo, and rewrite the list; returns their number.

    They are resolved separately: together, the dependency management of log4j's parent replaces Kafka's own versions.
    """
    import jgo

    jars: dict[str, Path] = {}
    for endpoint in (KAFKA, LOGGING):
        for artifact in jgo.resolve(endpoint):
            name = f"{artifact.groupId}:{artifact.artifactId}"
            jar = artifact.resolve()
            if jars.setdefault(name, jar) != jar:
                raise BrokerError(f"{KAFKA} and {LOGGING} want different versions of {name}: choose a matching {LOGGING.split(':')[1]}")
    lines = [f"{_sha256(jar)}  {jar.relative_to(maven_cache()).as_posix()}\n" for jar in jars.values()]
    pins.write_text("".join(lines))
    return len(lines)


def main(arguments: Iterable[str] | None = None) -> None:
    """Check the cached jars against the list, or with `--pin` rewrite the list."""
    parser = argparse.ArgumentParser(prog="python -m penstock.infra.broker.jars", description=main.__doc__)
    parser.add_argument("--pin", action="store_true", help="resolve the jars again and rewrite jars.sha256")
    if parser.parse_args(None if arguments is None else list(arguments)).pin:
        print(f"pinned {pin()} jars in {PINS}")
    else:
        print(f"{len(class_path(progress=print).split(os.pathsep))} jars match their pinned SHA-256")


if __name__ == "__main__":
    main()
