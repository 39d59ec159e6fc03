"""`prefect-rlhf init`: a configuration to begin with, made for a model and its rows. Loads no torch."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import yaml
from cyclopts import Parameter

from prefect_rlhf.flows.commands.options import check_writable, write_output
from prefect_rlhf.flows.run.downloads import fetched, local_model
from prefect_rlhf.flows.view.terminal import tell
from prefect_rlhf.rlhf_tasks.algorithms.configurations import make_config, resolve_paths
from prefect_rlhf.rlhf_tasks.algorithms.examples import prompt_tokens
from prefect_rlhf.rlhf_tasks.config.base import RunConfig
from prefect_rlhf.rlhf_tasks.data.dataset import Row, data_set
from prefect_rlhf.rlhf_tasks.data.recognition import Columns, recognised
from prefect_rlhf.rlhf_tasks.data.tokenizer import Tokenizer
from prefect_rlhf.rlhf_tasks.parallel.layout.parameters import parameters
from prefect_rlhf.rlhf_tasks.parallel.layout.shape import ModelShape
from prefect_rlhf.rlhf_tasks.parallel.layout.weight_files import read_shape
from prefect_rlhf.rlhf_tasks.system.reading import ConfigError, one_line

MODEL = "Qwen/Qwen3-0.6B"  # small enough for one GPU or patience, large enough to learn
LOOKED_AT = 100  # rows from which columns are recognised
LARGE = 1.5e9  # parameters from which a model is proposed to be trained by adapters
LEAST_TOKENS, MOST_TOKENS = 128, 4096  # of a prompt, as proposed
MOST_COMPLETION = 512
REWARDS, EXAMPLE_ROWS = "rewards.py", "prompts.jsonl"


@dataclass(frozen=True)
class Proposal:
    """How rows of a kind are trained on.

    what           of the algorithm, for the file's first line
    rates          learning rates of all weights, and of adapters
    passes         over the rows; iterations are bounded, too
    least, most    iterations
    rows           per iteration
    """

    algorithm: str
    what: str
    rates: tuple[float, float]
    passes: int
    least: int
    most: int
    rows: int


OF_KIND: Mapping[str, Proposal] = {
    "answers": Proposal("grpo", "GRPO, from rewards of the model's own answers", (1e-6, 2e-5), 3, 10, 500, 8),
    "prompts": Proposal("grpo", "GRPO, from rewards of the model's own answers", (1e-6, 2e-5), 3, 10, 500, 8),
    "completions": Proposal("sft", "Supervised fine-tuning", (1e-5, 2e-4), 3, 1, 5000, 32),
    "pairs": Proposal("dpo", "DPO, from pairs of answers", (1e-6, 1e-5), 1, 10, 5000, 32),
    "labels": Proposal("kto", "KTO, from answers that are desirable or not", (1e-6, 1e-5), 1, 10, 5000, 32),
}


def init(
    *,
    model: Annotated[str, Parameter("--model")] = MODEL,
    data: Annotated[str | None, Parameter("--data")] = None,
    out: Annotated[Path, Parameter("--out")] = Path("run.yaml"),
) -> None:
    """Write a configuration for a model and its rows, with comments, and an example of a reward where one is needed.

    The algorithm follows from the columns of the first rows: prompt and answer: GRPO; chosen and rejected: DPO;
    prompt and completion, or messages: SFT; these with a label: KTO. Nothing is overwritten.

    Parameters
    ----------
    model
        A model on the Hugging Face Hub, ORG/NAME[@REVISION], or a folder.
    data
        Rows: a data set on the Hub, or JSONL, JSON, CSV or Parquet: a file, glob or folder; default: sums, which are
        written as an example.
    out
        The configuration's file; the reward's is beside it.
    """
    rewards, example = out.parent / REWARDS, out.parent / EXAMPLE_ROWS
    _refuse_existing(out, *((rewards, example) if data is None else ()))
    check_writable(out)
    folder = local_model(model, weights=False)
    shape = read_shape(folder)
    if data is None:
        rows = _sums()
        columns = Columns("answers", right="answer", is_number=True)
        write_output(example, "".join(json.dumps(row) + "\n" for row in rows))
    else:
        place = _located(_drafted(model, {"train": data}, "sft", shape)).data
        rows = [placed.row for placed in data_set(place).some(LOOKED_AT)]
        columns = recognised(data, rows)
    section = _section(data or str(example), columns, rows, folder)
    proposal = OF_KIND[columns.kind]
    if proposal.algorithm == "grpo":
        _refuse_existing(rewards)
    local = _located(_drafted(model, section, proposal.algorithm, shape))
    longest, count = max(prompt_tokens(local), default=1), data_set(local.data).count()
    text = _configuration(model, section, out, columns, proposal, shape, longest, count)
    make_config(yaml.safe_load(text))  # what is written is sound
    if proposal.algorithm == "grpo":
        write_output(rewards, _reward_file(columns, out))
        tell(f"{rewards}: an example of a reward, to be made yours")
    write_output(out, text)
    tell(f"{out}: {proposal.what}, on {count:,} rows of {data or example}")
    tell(
        f"Next: prefect-rlhf config validate {out}{' --rewards' if proposal.algorithm == 'grpo' else ''}\n"
        f"      prefect-rlhf run {proposal.algorithm} --config {out}"
    )


def _section(data: str, columns: Columns, rows: Sequence[Row], model: str) -> dict[str, Any]:
    """The section `data` of the rows: their columns, and whether their text is put into the model's chat template."""
    section: dict[str, Any] = {"train": data}
    if columns.column_map:
        section["column_map"] = dict(columns.column_map)
    prompt = next((name for name, expected in columns.column_map.items() if expected == "prompt"), "prompt")
    is_text = any(isinstance(row.get(prompt), str) for row in rows)
    if is_text and Tokenizer.from_folder(model).has_chat_template:
        section["as_messages"] = True
    return section


def _located(draft: RunConfig) -> RunConfig:
    """The same with the files of what it names, downloaded from the Hub where that is needed; no weights."""
    return fetched(resolve_paths(draft, Path.cwd()), weights=False).config


def _refuse_existing(*paths: Path) -> None:
    for path in filter(os.path.lexists, paths):
        raise ConfigError(f"{path} already exists. Remove it, or name another folder: --out FOLDER/run.yaml.")


def _drafted(model: str, section: Mapping[str, Any], algorithm: str, shape: ModelShape) -> RunConfig:
    """A configuration that reads all rows, to see what they are like."""
    rows = {**section, "max_prompt_tokens": shape.context}
    document: dict[str, Any] = {"type": algorithm, "models": {"actor": model}, "total_iterations": 1}
    if algorithm == "grpo":
        document |= {"sampling": {"max_completion_length": 1}, "rewards": [{"function": "builtin:length"}]}
        document |= {"num_generations": 2}
    return make_config({**document, "data": {**rows, "on_bad_row": "skip"}})


def _configuration(
    model: str,
    section: Mapping[str, Any],
    out: Path,
    columns: Columns,
    proposal: Proposal,
    shape: ModelShape,
    longest: int,
    count: int,
) -> str:
    """The file's text."""
    name = proposal.algorithm
    samples = name == "grpo"
    weights = sum(math.prod(spec.shape) for spec in parameters(shape, "lm"))
    adapters = weights > LARGE
    completion = min(MOST_COMPLETION, max(1, shape.context // 2)) if samples else 0
    most = min(MOST_TOKENS, max(1, shape.context - completion))
    limit = min(most, max(LEAST_TOKENS, 2 ** math.ceil(math.log2(1.25 * longest))))
    iterations = min(proposal.most, max(proposal.least, math.ceil(proposal.passes * count / proposal.rows)))
    lines = [
        f"# {proposal.what}:  prefect-rlhf run {name} --config {out}",
        f"# Every further field, with its bounds and meaning:  prefect-rlhf config schema {name}",
        f"type: {name}",
        "models:",
        _commented(f"  actor: {_value(model)}", f"{weights:,} parameters"),
        "data:",
        _commented(f"  train: {_value(section['train'])}", f"{count:,} rows"),
    ]
    for key, comment in _OF_ROWS.items():
        if key in section:
            lines.append(_commented(f"  {key}: {_value(section[key])}", comment))
    lines += [
        _commented(
            f"  max_prompt_tokens: {limit}",
            f"{'of a prompt' if samples else 'of a whole row'}; the longest that was seen has {longest}",
        ),
        _commented("  on_bad_row: skip", "longer and malformed rows are left out, and listed; or refuse"),
    ]
    lines += {"grpo": _of_grpo(columns, out, completion), "dpo": _OF_DPO, "kto": _OF_KTO}.get(name, [])
    if adapters:
        lines.append(_commented("lora: {rank: 16, alpha: 32}", "without this line all weights are trained"))
    else:
        lines.append(_commented("# lora: {rank: 16, alpha: 32}", "trains adapters only, with less memory"))
    lines += [
        _commented(f"batch_size: {proposal.rows * (8 if samples else 1)}", _PER_ITERATION[name]),
        _commented(f"total_iterations: {iterations}", _passes(iterations * proposal.rows, count)),
        "optimizer:",
        _commented(
            f"  learning_rate: {_rate(proposal.rates[adapters])}", "the first figure to try others of"
        ),
        f"  warmup_steps: {min(10, iterations // 10)}",
        f"# evaluation: {{data: held_out.jsonl, every: {max(1, iterations // 10)}"
        f"{'' if samples else ', loss: true'}}}  # scores on rows that are not trained on",
        "# report_to: [tensorboard]              # or wandb, mlflow",
        "# cluster: {devices_per_host: 4}        # ranks; default: every visible GPU, or two on CPUs",
    ]
    return "\n".join(lines) + "\n"


_OF_ROWS = {
    "column_map": "name in the file: name that is expected",
    "as_messages": "prompts are the user's messages, in the model's chat template",
}
_PER_ITERATION = {
    "grpo": "answers per iteration: 8 prompts",
    "sft": "rows per iteration; they are packed without padding",
    "dpo": "pairs per iteration",
    "kto": "answers per iteration",
}
_OF_DPO = ["beta: 0.1                              # larger: closer to the model as it begins"]
_OF_KTO = [
    *_OF_DPO,
    "desirable_weight: 1.0                  # so that weight x number is about equal for both labels",
    "undesirable_weight: 1.0",
]


def _of_grpo(columns: Columns, out: Path, completion: int) -> list[str]:
    """The lines of sampling and rewards."""
    function = f"{out.parent / REWARDS}:{'correct' if columns.right else 'brief'}"
    built_in = "numeric_answer" if columns.is_number else "exact_match" if columns.right else "length"
    return [
        "sampling:",
        _commented(f"  max_completion_length: {completion}", "tokens of an answer"),
        "rewards:",
        _commented(f"  - function: {_value(function)}", f"yours; or built in, such as builtin:{built_in}"),
        _commented("num_generations: 8", "answers to each prompt, which are compared with each other"),
    ]


def _commented(line: str, comment: str) -> str:
    return f"{line:<38} # {comment}"


def _value(value: Any) -> str:
    """A value in YAML, in one line."""
    return (
        yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True)
        .removesuffix("\n...\n")
        .strip()
    )


def _rate(rate: float) -> str:
    return f"{rate:.1e}".replace("e-0", "e-")


def _passes(rows: int, count: int) -> str:
    passes = rows / count
    return f"{'about ' if passes % 1 else ''}{passes:.2g} passes over the rows"


def _sums() -> Sequence[Row]:
    """Rows of an example: sums of two numbers."""
    pairs = [(7 * i % 50 + 1, 11 * i % 40 + 2) for i in range(64)]
    return [
        {"prompt": f"What is {a} + {b}? Answer with the number alone.", "answer": str(a + b)}
        for a, b in pairs
    ]


def _reward_file(columns: Columns, out: Path) -> str:
    """Python source of an example that works on the rows."""
    name = one_line(out.name)
    head = f'"""The rewards of {name}. Try them:  prefect-rlhf config validate {name} --rewards"""\n\n'
    if columns.right is None:
        return head + _BRIEF
    body = _NUMBERS if columns.is_number else _TEXTS
    truth = '(right or {}).get("ground_truth")' if columns.right == "reward_model" else "right"
    if columns.right.isidentifier():
        taken, of_column = columns.right, columns.right
    else:
        taken, of_column = "**columns", f"columns[{columns.right!r}]"
    arguments = taken if taken.startswith("**") else f"{taken}, **columns"
    return head + body.replace("ARGUMENTS", arguments).replace("COLUMN", of_column).replace("TRUTH", truth)


_TEXT_OF = '''

def text_of(completion):
    """A completion is text, or messages where the prompts are messages."""
    return completion if isinstance(completion, str) else completion[-1]["content"]
'''
_NUMBERS = (
    """import re

NUMBER = re.compile(r"-?\\d[\\d,]*(?:\\.\\d+)?")
"""
    + _TEXT_OF
    + '''

def last_number(text):
    """The last number in a text, None where there is none."""
    numbers = NUMBER.findall(str(text))
    return float(numbers[-1].replace(",", "")) if numbers else None


def correct(prompts, completions, ARGUMENTS):
    """1 for each completion whose last number is that of the right answer, else 0; 0 where that has no number."""
    rewards = []
    for completion, right in zip(completions, COLUMN, strict=True):
        wanted = last_number(TRUTH)
        rewards.append(float(wanted is not None and last_number(text_of(completion)) == wanted))
    return rewards
'''
)
_TEXTS = (
    _TEXT_OF.lstrip("\n")
    + '''

def correct(prompts, completions, ARGUMENTS):
    """1 for each completion that has the right answer in it, in whatever case, else 0; 0 where that is empty."""
    rewards = []
    for completion, right in zip(completions, COLUMN, strict=True):
        truth = TRUTH
        wanted = "" if truth is None else str(truth).strip().lower()
        rewards.append(float(wanted != "" and wanted in text_of(completion).lower()))
    return rewards
'''
)
_BRIEF = (
    _TEXT_OF.lstrip("\n")
    + '''

def brief(prompts, completions, **columns):
    """An example, to be replaced by what you want of the answers: 1 for no words, falling to 0 for 100."""
    return [max(0.0, 1.0 - len(text_of(completion).split()) / 100) for completion in completions]
'''
)
