"""What the fork server has loaded, and so its forks: ranks on CPUs, the controller, exports.

Only the fork server imports this module (flows/cluster/forks.py). What is loaded stands in memory once.
"""

import gc
import os
import signal
from importlib import import_module

from prefect_rlhf.rlhf_tasks.system.child_processes import die_with_parent, wake_after_parent

LOADED = (
    "prefect_rlhf.rlhf_tasks.rank.host",
    "prefect_rlhf.rlhf_tasks.controller.controller",
    "prefect_rlhf.rlhf_tasks.rank.host",
    "prefect_rlhf.rlhf_tasks.rank.plan_nodes",
    "prefect_rlhf.rlhf_tasks.rank.export",
)


def _begin_fork() -> None:
    for number in (signal.SIGTERM, signal.SIGCONT):
        signal.signal(number, signal.SIG_DFL)
    if os.getppid() == _SERVER:  # not a fork of a fork
        die_with_parent(_SERVER)


# The SIGTERM of a worker of Prefect's reaches every process. The forks would end with the server. It ends when the
# process that has started it is gone, and its forks with it.
_SERVER = os.getpid()
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.register_at_fork(after_in_child=_begin_fork)
wake_after_parent(os.getppid(), lambda: os._exit(0))
for name in ("PYTHONPATH", "PYTHONSAFEPATH"):  # which were for this process; a fork is told its environment
    os.environ.pop(name, None)
for module in LOADED:
    import_module(module)
gc.freeze()  # a collection in a fork would write to the memory that it shares
