"""flows/session.py: what a command's process loads before it starts a run."""

import subprocess
import sys


def test_a_flow_process_starts_without_torch():
    code = "import sys, flows.session; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=300).returncode == 0
