#!/usr/bin/env bash
# Runs each security case of a folder; a case exits 0 if it is safe, 1 if not, 2 if it cannot be tried here.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/.."
cases=${1:-../shared/cases/security}
[ -d "$cases" ] || { echo "no security cases in $cases"; exit 0; }
failed=0
for case in "$cases"/*/run.sh; do
  name=$(basename "$(dirname "$case")")
  line=$(PENSTOCK_DIR=$PWD timeout 600 bash "$case" 2>&1); status=$?
  echo "$name: $status ${line##*$'\n'}"
  [ $status = 0 ] || [ $status = 2 ] || failed=1
done
exit $failed
