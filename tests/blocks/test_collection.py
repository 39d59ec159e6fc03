"""The package is a Prefect collection: installed, its blocks are found by their slugs."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

from prefect_rlhf.blocks import PPOConfiguration, RlhfCluster, StoredPlan

ROOT = Path(__file__).parents[2]
FIND = """
import sys
from prefect.blocks.core import Block
print(*(Block.get_block_class_from_key(slug).__module__ for slug in sys.argv[1:]))
"""


def test_prefect_finds_the_blocks_by_the_entry_point_of_the_project(tmp_path):
    """Nothing but Prefect is imported; what an installation writes is written here from pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    installed = tmp_path / "prefect_rlhf-0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: prefect-rlhf-as-installed\nVersion: 0\n"
    )
    points = project["entry-points"]["prefect.collections"]
    lines = ["[prefect.collections]", *(f"{name} = {value}" for name, value in points.items())]
    (installed / "entry_points.txt").write_text("\n".join(lines))
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    slugs = [block.get_block_type_slug() for block in (RlhfCluster, PPOConfiguration, StoredPlan)]
    found = subprocess.run(
        [sys.executable, "-c", FIND, *slugs], env=environment, capture_output=True, text=True, timeout=200
    )
    assert found.stdout.split() == [
        "prefect_rlhf.blocks.cluster",
        "prefect_rlhf.blocks.ppo",
        "prefect_rlhf.blocks.plan",
    ], found.stderr
