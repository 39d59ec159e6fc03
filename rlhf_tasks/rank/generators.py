"""Which generator a run's ranks draw with."""

from pkgutil import resolve_name

from prefect_rlhf.rlhf_tasks.config.base import RunConfig
from prefect_rlhf.rlhf_tasks.config.generation import BUILT_IN, OPENAI, VLLM, default_python, most_drawn
from prefect_rlhf.rlhf_tasks.config.sampling import Samples
from prefect_rlhf.rlhf_tasks.parallel.generate.generator import BuiltIn, Generator, Terms
from prefect_rlhf.rlhf_tasks.parallel.layout.weight_files import read_shape

GENERATORS = {
    BUILT_IN: f"{BuiltIn.__module__}:{BuiltIn.__name__}",
    OPENAI: "prefect_rlhf.rlhf_tasks.parallel.generate.openai_server:OpenAI",
    VLLM: "prefect_rlhf.rlhf_tasks.parallel.generate.vllm_process:Vllm",
}


def make_generator(config: RunConfig, tokens: int | None, run_folder: str | None = None) -> Generator:
    """The generator of a run on one rank, as its section `generation` says; that of our own where it has none.

    tokens      of the tokenizer
    run_folder  of the run; None: it has none
    """
    if not isinstance(config, Samples):
        return BuiltIn()
    section = config.generation
    actor = config.roles()["actor"]
    terms = Terms(
        folder=actor.folder,
        tokenizer=config.models.tokenizer,
        dtype=config.dtype,
        tokens=tokens,
        most_tokens=most_drawn(config, read_shape(actor.folder).context),
        patience=config.patience,
        settings={
            **section.model_dump(),
            "python": section.python or default_python(),
            "key": section.key(),
        },
        run_folder=run_folder,
    )
    return resolve_name(GENERATORS.get(section.engine, section.engine))(terms)
