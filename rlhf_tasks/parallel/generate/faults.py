"""When another engine is waited for no longer, and what that is called. Torch-free."""

START_S = 600.0
"""For vLLM to import itself, and to build the model and its caches: 13 s for a small one on two cores."""
STALL_S = 120.0
"""For another engine to take weights; for vLLM also without any token, for a server without the end of a response,
beside SECONDS_A_TOKEN for each that it may have."""
SECONDS_A_TOKEN = 0.2


class GenerationFault(RuntimeError):
    """An engine beside the run has failed, ended, answered what it should not, or said nothing for too long. The run
    repeats the iteration."""
