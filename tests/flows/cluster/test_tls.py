"""Clusters over TLS, found ones and our own: scheduler, workers, lease and links trust one authority, nobody else."""

import asyncio
import datetime
import logging
import stat
import urllib.error
import urllib.request
from contextlib import nullcontext
from pathlib import Path

import dask
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID
from distributed import Client, Scheduler, Security, SpecCluster, Worker
from distributed.core import connect

from prefect_rlhf.flows.cluster.cluster import ClusterError, found_cluster
from prefect_rlhf.rlhf_tasks.protocol.messages import Committed, Finished
from prefect_rlhf.rlhf_tasks.spec import SaveNode
from tests.rlhf_tasks.fake_flow import follow, run_spec
from tests.rlhf_tasks.plans import call, on, plan_of

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def certificate(subject, key, issuer, issuer_key, authority):
    """Signed by the issuer, valid from yesterday until tomorrow."""
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
    )
    return builder.sign(issuer_key, hashes.SHA256())


def named(name):
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def make_certificates(folder: Path) -> dict[str, str]:
    """An authority and one member that it vouches for; their files by the names of Dask's configuration."""
    folder.mkdir()
    keys = [ec.generate_private_key(ec.SECP256R1()) for _ in range(2)]
    authority = certificate(named("authority"), keys[0], named("authority"), keys[0], True)
    member = certificate(named("member"), keys[1], named("authority"), keys[0], False)
    files = {name: folder / f"{name}.pem" for name in ("ca-file", "cert", "key")}
    files["ca-file"].write_bytes(authority.public_bytes(Encoding.PEM))
    files["cert"].write_bytes(member.public_bytes(Encoding.PEM))
    secret = keys[1].private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    files["key"].write_bytes(secret)
    return {name: str(path) for name, path in files.items()}


def trusting(certificates):
    """Dask's own configuration of this process with these certificates."""
    tls = {"distributed.comm.tls.ca-file": certificates["ca-file"]}
    for who in ("client", "scheduler", "worker"):
        tls |= {f"distributed.comm.tls.{who}.{part}": certificates[part] for part in ("cert", "key")}
    return dask.config.set(tls)


@pytest.fixture
def tls(tmp_path):
    """(address of a cluster of two ranks and a controller that anybody reaches, its certificates). All of it is in
    this process: what its members say to each other is encrypted all the same."""
    certificates = make_certificates(tmp_path / "ours")
    with trusting(certificates):
        security = Security()
    with dask.config.set({"distributed.scheduler.allowed-failures": 0}):
        options = {"security": security, "dashboard": False, "dashboard_address": "127.0.0.1:0"}
        members = [("boss", "controller"), ("r0", "slot"), ("r1", "slot")]
        workers = {
            name: {"cls": Worker, "options": {**options, "nthreads": 1, "resources": {resource: 1}}}
            for name, resource in members
        }
        scheduler = {"cls": Scheduler, "options": {**options, "protocol": "tls", "port": 0}}
        with SpecCluster(workers, scheduler, security=security, silence_logs=logging.ERROR) as cluster:
            yield cluster.scheduler_address, certificates


def test_a_cluster_over_tls_serves(tls, tmp_path):
    address, certificates = tls
    with trusting(certificates), found_cluster(address, 2, folder=tmp_path, deadline_s=60) as cluster:
        members = (*cluster.ranks, cluster.controller)
        assert all(at.startswith("tls://") for at in (address, *(member.address for member in members)))
        plan = plan_of(
            (
                call("actor_train", "actor", "train_step", on(0)),
                SaveNode(name="save_actor", role="actor", placement=on(0), after=("actor_train",)),
            ),
            {"actor": on(0)},
            1,
        )
        events = asyncio.run(follow(cluster, run_spec(cluster, plan, tmp_path, iterations=2)))
    told = [type(event) for _, event in events if isinstance(event, Committed | Finished)]
    assert told == [Committed, Committed, Finished]


def without_keys():
    """Dask's own configuration of a process that knows no keys."""
    names = (
        "ca-file",
        *(f"{who}.{part}" for who in ("client", "scheduler", "worker") for part in ("cert", "key")),
    )
    return dask.config.set({f"distributed.comm.tls.{name}": None for name in names})


@pytest.mark.parametrize("who", ["nobody's", "another authority's"])
def test_who_has_other_certificates_is_not_let_in(tls, tmp_path, who):
    address, _ = tls
    theirs = nullcontext() if who == "nobody's" else trusting(make_certificates(tmp_path / "theirs"))
    with (
        theirs,
        pytest.raises(ClusterError, match=r"no Dask scheduler answers .*set distributed\.comm\.tls\.\*"),
        found_cluster(address, 2, folder=tmp_path, deadline_s=2),
    ):
        pass


@pytest.mark.parametrize("who", ["nobody's", "another authority's", "in clear text"])
def test_nobody_else_gets_into_a_cluster_of_our_own(cluster, tmp_path, who):
    addresses = [cluster.scheduler_address, *(m.address for m in (*cluster.ranks, cluster.controller))]
    assert all(address.startswith("tls://127.0.0.1:") for address in addresses)
    theirs = trusting(make_certificates(tmp_path / "theirs")) if who.startswith("another") else without_keys()

    async def knock(address):
        (await connect(address, timeout=3, **Security().get_connection_args("client"))).abort()

    with theirs:
        for address in addresses:
            with pytest.raises((OSError, TypeError)):  # TypeError: no certificate to show at all
                asyncio.run(knock(address.replace("tls://", "tcp://") if who == "in clear text" else address))


def test_only_its_owner_reads_the_keys_of_a_cluster_of_our_own(cluster):
    key, certificate = (Path(getattr(cluster.security, f"tls_client_{part}")) for part in ("key", "cert"))
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (key.parent, key, certificate)]
    assert modes == [0o700, 0o600, 0o600]


def test_the_http_servers_of_a_cluster_of_our_own_show_nothing(cluster):
    with Client(cluster.scheduler_address, set_as_default=False) as client:
        ports = [client.scheduler_info()["services"]["dashboard"]]
        ports += client.run(lambda dask_worker: dask_worker.http_server.port).values()
    for port in ports:
        for page in ("info/main/workers.html", "health", "metrics"):
            with pytest.raises(urllib.error.HTTPError, match="404"):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/{page}", timeout=10)
