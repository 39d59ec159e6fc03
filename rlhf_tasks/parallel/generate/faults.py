"""What another engine's failure is called. Torch-free."""


class GenerationFault(RuntimeError):
    """An engine beside the run has failed, ended, answered what it should not, or said nothing for too long. The run
    repeats the iteration."""
