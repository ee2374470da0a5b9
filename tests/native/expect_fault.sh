#!/bin/sh
# Runs every planted fault of a driver, and fails unless each one kills it with the report that the plant names.
#
#   expect_fault.sh DRIVER [launcher ...]     a launcher stands before the driver: setarch, qemu
driver=$1
shift
status=0
count=0
plants=$("$@" "$driver" --plants) || exit 1
tab=$(printf '\t')
while IFS="$tab" read -r name report; do
  [ -n "$name" ] || continue
  count=$((count + 1))
  if said=$( { "$@" "$driver" --plant "$name" </dev/null; } 2>&1); then
    echo "the planted fault $name went unnoticed" >&2
    status=1
  elif ! printf '%s\n' "$said" | grep -qF -- "$report"; then
    printf 'the planted fault %s was not reported as "%s":\n%s\n' "$name" "$report" "$said" >&2
    status=1
  fi
done <<EOF2
$plants
EOF2
if [ "$count" -eq 0 ]; then
  echo "$driver has no planted faults: is its sanitizer on?" >&2
  exit 1
fi
[ "$status" -eq 0 ] && echo "$(basename "$driver"): $count planted faults caught"
exit "$status"
