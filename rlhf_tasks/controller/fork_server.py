"""What the fork server has loaded, and so its forks: ranks on CPUs, the controller, exports.

Only the fork server imports this module (flows/cluster/forks.py). What is loaded stands in memory once.
"""

import gc
import os
import signal
from importlib import import_module

from rlhf_tasks.system.child_processes import die_with_parent, live_without_parent

LOADED = (
    "rlhf_tasks.rank.worker_process",
    "rlhf_tasks.controller.controller",
    "rlhf_tasks.controller.rank_link",
    "rlhf_tasks.rank.host",
    "rlhf_tasks.rank.executor",
    "rlhf_tasks.rank.export",
)

# The SIGTERM of a worker of Prefect's reaches every process. The forks would end with the server. It ends by itself
# when the process that has started it is gone: multiprocessing looks for that, once all is loaded.
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))
die_with_parent(os.getppid())
for name in ("PYTHONPATH", "PYTHONSAFEPATH"):  # which were for this process; a fork is told its environment
    os.environ.pop(name, None)
try:
    for module in LOADED:
        import_module(module)
finally:
    live_without_parent()  # the thread that has started this process may end
gc.freeze()  # a collection in a fork would write to the memory that it shares
