"""Packages that tests take from the registry, each in a folder of its own, made once on a machine."""

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import distributions
from pathlib import Path

from filelock import FileLock

CACHE = Path(tempfile.gettempdir()) / "prefect-rlhf-test-packages"
INSTALL_S = 900


def pip(*arguments: str) -> str:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", *arguments]
    return subprocess.run(command, check=True, timeout=INSTALL_S, stdout=subprocess.PIPE, text=True).stdout


def folder_of(wanted: str, needs: Sequence[str] = ()) -> Path:
    """The folder of a package.

    wanted  NAME==VERSION
    needs   what it needs beside what is installed here, in the versions that fit; without them it is only read
    """
    CACHE.mkdir(exist_ok=True)
    name = f"{wanted}, runs" if needs else wanted  # a folder that was only to be read lacks what it needs
    target = CACHE / name
    with FileLock(CACHE / f"{name}.lock", timeout=2 * INSTALL_S):
        if target.exists():
            return target
        exact = {wanted}
        if needs:
            fixed = CACHE / f"{name}.constraints"
            fixed.write_text("".join(f"{each.name}=={each.version}\n" for each in distributions()))
            found = pip("--dry-run", "--report", "-", "-c", str(fixed), *needs)
            new = [each["metadata"] for each in json.loads(found)["install"]]
            exact |= {f"{each['name']}=={each['version']}" for each in new}
        begun = CACHE / f"{name}.begun"
        shutil.rmtree(begun, ignore_errors=True)
        pip("--no-deps", "--target", str(begun), *exact)
        begun.rename(target)
    return target
