#!/bin/sh
# Runs every planted fault of a driver; fails unless each one ends the driver with its expected report.
#
#   expect_fault.sh DRIVER [LAUNCHER ...]     LAUNCHER runs the driver: setarch, qemu
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
  echo "$driver has no planted faults; build it with a sanitizer" >&2
  exit 1
fi
[ "$status" -eq 0 ] && echo "$(basename "$driver"): $count planted faults caught"
exit "$status"
