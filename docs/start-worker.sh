#!/bin/sh
# Start a worker (docs/Dockerfile.worker): a valid lock, or a new one, then the command.
# PREQUAL_POLICY=strict serves no fast path without it, so a start that could not qualify is slow and says why; it is
# never wrong. PREQUAL_REQUIRE=1 ends such a start instead.
set -u
if [ -z "${PREQUAL_LOCK:-}" ]; then
  echo "start-worker: PREQUAL_LOCK: expected the path of a lock, got none" >&2
  exit 2
fi
if prequal lock explain "$PREQUAL_LOCK" > /dev/null 2>&1; then
  exec "$@"
fi
echo "start-worker: no valid lock at $PREQUAL_LOCK: qualifying" >&2
# qualify reads no lock; a stale one must not close its gate
env -u PREQUAL_LOCK prequal qualify --write "$PREQUAL_LOCK"
code=$?
if [ "$code" != 0 ]; then
  echo "start-worker: not everything qualified (exit code $code); what did not is answered by the reference" >&2
  if [ "${PREQUAL_REQUIRE:-0}" = 1 ]; then
    exit "$code"
  fi
fi
exec "$@"
