"""Engines beside the ranks: how long they are waited for, what their failures are called. Torch-free."""

START_S = 600.0
"""For vLLM to import itself, and to build the model and its caches: 13 s for a small one on two cores."""
STALL_S = 120.0
"""For another engine to take weights; for vLLM also without any token, for a server without the end of a response,
beside SECONDS_A_TOKEN for each that it may have."""
SECONDS_A_TOKEN = 0.2
BLOCK_ON_CPUS, BLOCK_ON_GPUS = 32, 16
"""Tokens whose keys and values vLLM keeps together. Samples of a group share whole blocks of their prompt: by
its default on CPUs, 128, few prompts have one."""


class GenerationFault(RuntimeError):
    """An engine beside the run has failed, ended, answered what it should not, or said nothing for too long. The run
    repeats the iteration."""
