# Rows of a table, for scripts that check machines: sourced by tests/gpu.sh and tests/real.sh, which set
#   section    the step that runs     deadline    when its time is over, as SECONDS counts
#   row_limit  seconds of a row       LIMITS      seconds of each section
#   table      file of the rows       out         folder of the rows' logs
# shellcheck shell=bash

# A row of the table, kept at once, so that a run that is cut short still has those before.
note() { printf '%-9s %-34s %-8s %s\n' "$section" "$1" "$2" "$3" >>"$table"; }

# The seconds that a row may take, in `left`; false, with a word in the row's log, if the section's time is over.
time_left() {
  left=$((deadline - SECONDS))
  if [ "$left" -le 0 ]; then
    echo "not run: the section's ${LIMITS[$section]} s were over" >"$out/$1.log"
    return 1
  fi
  [ "$left" -lt "$row_limit" ] || left=$row_limit
}

# Runs a command within what the row and its section may take; its output goes to the row's log.
bounded() {
  local name=$1 left status=0
  shift
  time_left "$name" || return 1
  timeout --kill-after=10 "$left" "$@" >"$out/$name.log" 2>&1 || status=$?
  [ "$status" -ne 124 ] || echo "ended after $left s" >>"$out/$name.log"
  return "$status"
}

last_line() { { grep -v '^$' "$out/$1.log" || true; } | tail -n 1 | tr -s ' ' | cut -c1-110; }

# One check by exit status, with its last line.
check() {
  local name=$1 start=$SECONDS status=passed
  shift
  bounded "$name" "$@" || status=FAILED
  # A test program of which a filter leaves no test ends well.
  ! grep -q '^running 0 tests' "$out/$name.log" || status=FAILED
  note "$name" "$status" "$((SECONDS - start)) s  $(last_line "$name")"
}
