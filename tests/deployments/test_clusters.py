"""The files of clusters of several hosts: their syntax, and that Dask's commands know their options."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from kubernetes_validate import ValidationError, validate

FOLDER = Path(__file__).parents[2] / "deployments" / "clusters"
PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "several-hosts.md"


def test_the_job_is_a_script_that_bash_can_read():
    subprocess.run(["bash", "-n", str(FOLDER / "slurm.sh")], check=True)


@pytest.mark.parametrize(
    ("given", "task", "its"),
    [("4,5,GPU-7f", 2, "GPU-7f"), ("0", 3, "0"), ("", 3, "3"), ("NoDevFiles", 1, "NoDevFiles")],
    ids=["one of the job's", "its own alone", "nothing said", "none"],
)
def test_each_task_of_a_job_has_a_gpu_of_those_that_slurm_gives(given: str, task: int, its: str):
    (line,) = re.findall(
        r"^ *(export CUDA_VISIBLE_DEVICES=.*)", (FOLDER / "slurm.sh").read_text(), re.MULTILINE
    )
    environment = {"PATH": os.environ["PATH"], "CUDA_VISIBLE_DEVICES": given, "SLURM_LOCALID": str(task)}
    told = subprocess.run(
        ["bash", "-c", f"{line}; echo $CUDA_VISIBLE_DEVICES"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout.strip() == its


def test_the_manifest_is_a_list_whose_pods_share_their_volumes():
    items = yaml.safe_load((FOLDER / "kubernetes.yaml").read_text())["items"]
    assert [item["kind"] for item in items] == ["Service", "Deployment", "StatefulSet"]
    pods = [item["spec"]["template"]["spec"] for item in items if "template" in item["spec"]]
    for pod in pods:
        volumes = {volume["name"] for volume in pod["volumes"]}
        for container in pod["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} == volumes


@pytest.mark.parametrize("version", ["1.30", "1.37"])
def test_the_manifest_is_valid_by_the_schemas_that_kubernetes_publishes(version: str):
    items = yaml.safe_load((FOLDER / "kubernetes.yaml").read_text())["items"]
    for item in items:
        validate(item, version, strict=True)
    items[2]["spec"]["template"]["spec"]["containers"][0]["resources"]["limit"] = {"nvidia.com/gpu": 8}
    with pytest.raises(ValidationError, match="limit"):
        validate(items[2], version, strict=True)


@pytest.mark.parametrize("command", ["scheduler", "worker"])
def test_dask_knows_every_option(command: str):
    told = subprocess.run(
        [sys.executable, "-m", "dask", command, "--help"], capture_output=True, text=True, check=True
    ).stdout
    texts = [path.read_text() for path in (PAGE, FOLDER / "slurm.sh", FOLDER / "kubernetes.yaml")]
    used = [
        option
        for text in texts
        for call in re.findall(rf"dask,? {command}\b(?:[^\n`]|\\\n|,\n)*", text)
        for option in re.findall(r"--[a-z-]+", call)
    ]
    assert len(used) > 6
    assert set(used) <= set(re.findall(r"--[a-z-]+", told))
