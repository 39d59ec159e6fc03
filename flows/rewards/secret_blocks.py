"""Reads the Prefect Secret blocks that arguments of rewards and of the environment name. Only their processes get
the values."""

from prefect.blocks.system import Secret
from prefect.settings import PREFECT_API_URL

from flows.rewards.find import blocks_named
from rlhf_tasks.algorithms.configurations import ConfigError
from rlhf_tasks.config.base import RunConfig

INSTEAD = "or name an environment variable: {env: VARIABLE}"


def refuse_blocks_without_server(config: RunConfig) -> list[str]:
    """The names of the blocks in a configuration.

    Raises ConfigError when there are some and no server is configured: a run's own server has no blocks at first.
    """
    names = blocks_named(config)
    if names and not PREFECT_API_URL.value():
        raise ConfigError(
            f"a reward's or environment's kwargs name the Prefect Secret block {names[0]!r}, and no server is "
            f"configured. Set PREFECT_API_URL to one that has it, {INSTEAD}."
        )
    return names


async def secret_blocks(config: RunConfig) -> dict[str, str]:
    """Block -> its value, from the configured server. Raises ConfigError for a block that does not exist."""
    values = {}
    for name in refuse_blocks_without_server(config):
        try:
            block = await Secret.aload(name)
        except ValueError:
            raise ConfigError(
                f"a reward's or environment's kwargs name the Prefect Secret block {name!r}, which does not exist on "
                f"the server {PREFECT_API_URL.value()}. Make it, {INSTEAD}."
            ) from None
        values[name] = str(block.get())
    return values
