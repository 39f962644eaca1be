#!/usr/bin/env bash
# instructions.sh PROGRAM: instructions per item of the hot functions, counted by callgrind, against a ceiling.
# Counts are equal on every run of one binary; a rise means that the code does more, not that the machine is busy.
set -euo pipefail
program="$1"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
failed=0

check() {  # FUNCTION CEILING WHAT
  local items total
  valgrind --tool=callgrind --callgrind-out-file="$work/out" "--toggle-collect=*$1*" "$program" \
    >"$work/stdout" 2>"$work/stderr" || { cat "$work/stderr"; exit 1; }
  items="$(awk '{print $1}' "$work/stdout")"
  total="$(awk '/^summary:/ {print $2} /^totals:/ {print $2}' "$work/out" | tail -n 1)"
  local each=$(((total + items - 1) / items))
  echo "$3: $each instructions (ceiling $2)"
  if [ "$each" -gt "$2" ] || [ "$each" -lt 2 ]; then
    failed=1
  fi
}

check make_keys 180 "one key"
check search_hit 30 "one chunk of a hit search over two groups"
check retire_jobs 1000 "one of many jobs that end together"
exit "$failed"
