#!/usr/bin/env bash
# Resolves the locks again from the package index: a lock that `make lock` would change fails. Without an index nothing is compared.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
copy=$(mktemp -d); trap 'rm -rf "$copy"' EXIT
uv=$(command -v uv || echo "$PWD/.venv/bin/uv")
echo packaging | timeout 20 "$uv" pip compile --quiet --no-cache - >/dev/null 2>&1 || { echo "locks: no package index can be reached; not resolved again"; exit 0; }
cp --parents requirements*.in requirements*.lock overrides.txt docs/requirements.in docs/requirements.lock pyproject.toml deploy/image/locks/*.lock "$copy"
make --no-print-directory --silent -j3 -C "$copy" -f "$PWD/Makefile" VENV="$PWD/.venv" lock
for lock in requirements.lock requirements-gpu.lock docs/requirements.lock deploy/image/locks/*.lock; do
  cmp -s "$lock" "$copy/$lock" || { echo "locks: $lock is not what its .in file resolves to; make lock" >&2; exit 1; }
  echo "locks: $lock resolves again, $(grep -c '^[a-z0-9].*==' "$lock") packages"
done
