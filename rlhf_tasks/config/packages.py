"""The packages whose environments a run can use by name. Loads none of them."""

from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple


class Package(NamedTuple):
    """A package of environments, which the user installs.

    version    that the adapter is tested with
    is_loaded  whether the adapter loads it; else its environments are the user's own classes, of its form
    """

    name: str
    version: str
    is_loaded: bool = True

    @property
    def series(self) -> str:
        """The versions that the adapter is for: of this minor version."""
        return self.version.rpartition(".")[0]


PACKAGES = {
    "openenv": Package("openenv", "0.10.0"),
    "reasoning_gym": Package("reasoning-gym", "0.1.25"),
    "skyrl": Package("skyrl-gym", "0.4.0"),
    "textarena": Package("textarena", "0.7.4"),
    "trl": Package("trl", "1.16.0", is_loaded=False),
    "verifiers": Package("verifiers", "0.4.0"),
}
"""Kind of environment, which begins `environment.factory` -> its package; the adapters are in
user_code/environment_kinds."""


def refusal(kind: str) -> str:
    """Why this machine cannot run environments of a kind, as a sentence; "" where it can."""
    package = PACKAGES[kind]
    if not package.is_loaded:
        return ""
    install = f'Run `pip install "{package.name}~={package.series}.0"`.'
    try:
        found = version(package.name)
    except PackageNotFoundError:
        return f"the package {package.name} is not installed. {install}"
    if found == package.series or found.startswith(f"{package.series}."):
        return ""
    return f"{package.name} {found} is installed, but {package.series} is needed. {install}"
