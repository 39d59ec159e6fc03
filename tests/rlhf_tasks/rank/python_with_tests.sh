#!/bin/sh
# The interpreter that runs the tests, where it finds their modules too.
PYTHONPATH="$(dirname "$0")/../../.." exec "$RLHF_TEST_PYTHON" "$@"
