"""A run on hosts that are reached by SSH, on a Dask cluster that ends with it (docs/how-to/several-hosts.md).

    python ssh.py --devices 8 10.77.0.1 10.77.0.2 -- ppo --config ppo.yaml name=nightly

The scheduler and the controller are on the first host, and a worker for each device on every host. All hosts have
this environment and project under the same paths, as on a shared file system, and a key that opens them to this
account. Dask's variables for TLS are set on this host only; the others inherit them. Needs the package asyncssh.
"""

import argparse
import signal
import subprocess
import sys
from typing import Any

import dask
from distributed import SpecCluster
from distributed.deploy.ssh import Scheduler, Worker

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


SAFE = {
    "distributed.scheduler.allowed-failures": 0,  # a call must not run twice
    "distributed.scheduler.worker-ttl": "10 minutes",  # a long call is no dead worker
}


def worker(
    name: str, host: str, offers: str, interface: str, port: int, **environment: str
) -> dict[str, Any]:
    """A worker that offers one of something."""
    network = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface} if interface else {}
    options = {
        "name": name,
        "host": host,
        "nthreads": 1,
        "memory_limit": 0,
        "dashboard": False,
        "resources": {offers: 1},
        "env": {**network, **environment},
    }
    return {
        "cls": Worker,
        "options": {"address": host, "connect_options": {"port": port}, "kwargs": options},
    }


def main() -> int:
    """The run's exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("hosts", nargs="+")
    parser.add_argument("--devices", type=int, default=8, help="devices of each host")
    parser.add_argument("--offers", default="GPU", help="GPU, or slot for CPU ranks")
    parser.add_argument("--threads", type=int, default=4, help="threads of a rank")
    parser.add_argument(
        "--interface", default="", help="the network interface between the hosts, such as eth0"
    )
    parser.add_argument("--port", type=int, default=22, help="of the SSH servers")
    ours = (
        sys.argv[1:].index("--") if "--" in sys.argv else parser.error("the run's arguments stand after --")
    )
    place, run = parser.parse_args(sys.argv[1 : ours + 1]), sys.argv[ours + 2 :]

    first, how = place.hosts[0], (place.interface, place.port)
    workers = {"controller": worker("controller", first, "controller", *how)}
    for number, host in enumerate(place.hosts):
        for device in range(place.devices):
            threads = dict.fromkeys(THREADS, str(place.threads))
            name = f"rank-{number}-{device}"
            workers[name] = worker(
                name, host, place.offers, *how, CUDA_VISIBLE_DEVICES=str(device), **threads
            )
    scheduler = {
        "address": first,
        "connect_options": {"port": place.port},
        "kwargs": {"host": first, "port": 8786, "protocol": "tls", "dashboard": False},
    }
    dask.config.set(SAFE)
    with SpecCluster(workers, {"cls": Scheduler, "options": scheduler}, name="ssh"):
        where = (
            f"cluster.address=tls://{first}:8786",
            f"cluster.n_hosts={len(place.hosts)}",
            f"cluster.devices_per_host={place.devices}",
        )
        with subprocess.Popen(["prefect-rlhf", "run", *run, *where]) as command:
            # The run ends at its commit; a terminal sends it Ctrl-C itself.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGTERM, lambda *_: command.terminate())
            return command.wait()


if __name__ == "__main__":
    sys.exit(main())
