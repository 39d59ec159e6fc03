"""A cluster found over TLS: scheduler, workers, links and tasks trust one authority, and nobody else."""

import asyncio
import datetime
from contextlib import nullcontext
from pathlib import Path

import dask
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID
from prefect import flow

from flows.cluster import found_cluster
from flows.members import ClusterError
from flows.training import run_training
from tests.flows.dask_commands import SAFE, dask_command, dask_scheduler
from tests.rlhf_tasks.plans import small_plan

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


@pytest.fixture(scope="module")
def tls(tmp_path_factory):
    """A scheduler, two ranks and a controller, which anybody reaches; (address, certificates, a rank's command)."""
    folder = tmp_path_factory.mktemp("tls")
    certificates = make_certificates(folder / "ours")
    options = [text for name, path in certificates.items() for text in (f"--tls-{name}", path)]
    with (
        trusting(certificates),
        dask_scheduler(folder, host=("--protocol", "tls", *options), **SAFE) as address,
    ):
        common = ["worker", address, *options, "--no-dashboard", "--memory-limit", "0"]
        common += ["--local-directory", str(folder)]
        rank = [*common, "--nthreads", "1", "--resources", "slot=1"]
        with (
            dask_command(*common, "--nthreads", "16", "--resources", "controller=1", "--name", "boss"),
            dask_command(*rank),
            dask_command(*rank),
        ):
            yield address, certificates


def test_a_cluster_over_tls_serves_and_its_ranks_come_back(tls, prefect, tmp_path):
    address, certificates = tls
    assert address.startswith("tls://")
    environment = prefect.environment
    with (
        trusting(certificates),
        found_cluster(address, 2, folder=tmp_path, environment=environment) as cluster,
    ):
        addresses = [
            cluster.scheduler_address,
            *(member.address for member in (*cluster.ranks, cluster.controller)),
        ]
        assert all(address.startswith("tls://") for address in addresses)

        @flow(name="rlhf-fake", persist_result=False)
        async def parent():
            return await run_training(
                small_plan(),
                {"fault": {"kind": "kill", "node": "generate", "iteration": 1, "rank": 0}},
                cluster,
                run="encrypted",
                run_folder=tmp_path,
                iterations=3,
                executor="tests.rlhf_tasks.fake_rank:make_executor",
                snapshots="tests.rlhf_tasks.fake_rank:make_snapshots",
            )

        result = asyncio.run(parent())
    assert result.committed_step == 3
    assert len(result.faults) == 1


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
