"""The values of the Prefect Secret blocks that rewards' arguments name: they go to the rewards' processes alone."""

from prefect.blocks.system import Secret
from prefect.settings import PREFECT_API_URL

from rlhf_tasks.config import AnyConfig, ConfigError, PPOConfig, RolloutConfig
from rlhf_tasks.user_code import secret_named


async def secret_blocks(config: AnyConfig) -> dict[str, str]:
    """Block -> its value, from the server that this process reports to. Raises ConfigError where one is not there."""
    rewards = config.rewards if isinstance(config, PPOConfig | RolloutConfig) else ()
    named = {secret_named(value) for reward in rewards for value in reward.kwargs.values()}
    values = {}
    for name in sorted(name for kind, name in filter(None, named) if kind == "block"):
        try:
            block = await Secret.aload(name)
        except ValueError:
            where = PREFECT_API_URL.value() or "no server: PREFECT_API_URL is not set"
            raise ConfigError(
                f"a reward's kwargs name the Prefect Secret block {name!r}, which is not there ({where}). Make it, "
                "or name an environment variable: {env: VARIABLE}."
            ) from None
        values[name] = str(block.get())
    return values
