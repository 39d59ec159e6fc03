"""`prefect-rlhf chat` and `generate`: try the model of a run, or of a folder, on this machine."""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, TextIO

from cyclopts import Parameter

from prefect_rlhf.flows.commands.options import check_range, check_writable, whole, whole_seed
from prefect_rlhf.flows.run.downloads import fetched, local_data, local_model
from prefect_rlhf.flows.run.run_folder import FORMAT, existing_run_folder, exported_step
from prefect_rlhf.flows.view.terminal import phase, tell
from prefect_rlhf.rlhf_tasks.algorithms.examples import read_examples
from prefect_rlhf.rlhf_tasks.checkpoint.commits import commit_to_export
from prefect_rlhf.rlhf_tasks.config.data import DataConfig
from prefect_rlhf.rlhf_tasks.config.hub_names import hub_model
from prefect_rlhf.rlhf_tasks.data.dataset import DataSet, data_set
from prefect_rlhf.rlhf_tasks.data.rows import PromptExample, prompt_example
from prefect_rlhf.rlhf_tasks.parallel.layout.weight_files import is_model_folder
from prefect_rlhf.rlhf_tasks.system.reading import ConfigError, printable

if TYPE_CHECKING:
    from prefect_rlhf.rlhf_tasks.answering import AnsweringModel, Drawn

AT_ONCE = 32  # prompts of a file whose answers are drawn together
MOST_NEW_TOKENS = 1 << 20


@Parameter(name="*")
@dataclass(frozen=True)
class Drawing:
    """How answers are drawn.

    Parameters
    ----------
    temperature
        Divides the logits; 0 takes the likeliest tokens.
    top_p
        Probability mass that is drawn from.
    max_new_tokens
        Most tokens of an answer.
    seed
        Of what is drawn: the same seed and words give the same answers.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    max_new_tokens: str = "256"
    seed: str = "0"

    def checked(self) -> "Drawn":
        """The same for the model. Raises ConfigError for an option that is out of range."""
        check_range("--temperature", self.temperature, -1e-9, 1e3, "a temperature is a number from 0 to 1000")
        check_range("--top-p", self.top_p, 0.0, 1.0, "a share of the probability is above 0 and at most 1")
        tokens = whole(
            "--max-new-tokens",
            self.max_new_tokens,
            1,
            f"a number of tokens is a whole number from 1 to {MOST_NEW_TOKENS:,}",
            most=MOST_NEW_TOKENS,
        )
        number = whole_seed(self.seed)
        from prefect_rlhf.rlhf_tasks.answering import Drawn  # torch takes seconds to import

        return Drawn(tokens, self.temperature, self.top_p, number)


@Parameter(name="*")
@dataclass(frozen=True)
class Talking(Drawing):
    """The same, with the defaults of a conversation."""

    temperature: float = 0.7
    max_new_tokens: str = "512"


def chat(
    model: Path,
    /,
    *,
    system: Annotated[str | None, Parameter("--system")] = None,
    drawing: Talking = Talking(),
) -> None:
    """Talk to a trained model in the terminal, until Ctrl-D or Ctrl-C.

    Parameters
    ----------
    model
        A run's folder, a model's (also of an adapter), or a model on the Hub, ORG/NAME.
    system
        The system's message, which the conversation begins with.
    drawing
        How answers are drawn.
    """
    drawn = drawing.checked()
    with _answering(model) as answering:
        _refuse_without_template(answering, model)
        begin = [] if system is None else [{"role": "system", "content": system}]
        if sys.stdin.isatty():
            tell("Ctrl-D ends.")
        try:
            _talk(answering, begin, drawn)
        except KeyboardInterrupt:
            print()


def _talk(answering: "AnsweringModel", begin: list[dict[str, str]], drawn: "Drawn") -> None:
    messages = list(begin)
    while (said := _heard()) is not None:
        if not said.strip():
            continue
        messages.append({"role": "user", "content": said})
        prompt = _opened(answering, messages)
        if len(prompt) >= answering.context and len(messages) > len(begin) + 1:
            tell(
                f"(The model's context of {answering.context:,} tokens is full: the conversation begins anew.)"
            )
            messages = [*begin, messages[-1]]
            prompt = _opened(answering, messages)
        pieces = list[str]()
        try:
            for piece in answering.stream(prompt, drawn):
                pieces.append(piece)
                print(printable(piece), end="", flush=True)
        except ConfigError as error:  # this message is too long; others may not be
            tell(f"error: {error}")
            del messages[len(begin) :]
            continue
        print()
        messages.append({"role": "assistant", "content": "".join(pieces)})


def _heard() -> str | None:
    """A line of the user's; None at the end."""
    try:
        return input("> " if sys.stdin.isatty() else "")
    except EOFError:
        if sys.stdin.isatty():
            print()
        return None


def _opened(answering: "AnsweringModel", messages: list[dict[str, str]]) -> list[int]:
    """The tokens of a conversation in which the assistant's turn is open."""
    (text,) = answering.tokenizer.render([(messages, True)])
    return answering.tokenizer.encode(text)


def _refuse_without_template(answering: "AnsweringModel", model: Path) -> None:
    if not answering.tokenizer.has_chat_template:
        raise ConfigError(
            f"the model of {model} has no chat template, so it takes no messages. Use `prefect-rlhf generate {model} "
            "--prompt TEXT`, or add chat_template.jinja to its folder."
        )


def generate(
    model: Path,
    /,
    *,
    prompt: Annotated[str | None, Parameter("--prompt")] = None,
    file: Annotated[str | None, Parameter("--file")] = None,
    out: Annotated[Path | None, Parameter("--out")] = None,
    drawing: Drawing = Drawing(),
) -> None:
    """Complete a text, or each row of a file, with a trained model.

    Parameters
    ----------
    model
        A run's folder, a model's (also of an adapter), or a model on the Hub, ORG/NAME.
    prompt
        A text, which the model continues as it stands.
    file
        Rows with a column `prompt` (text or messages) or a conversation: JSONL, JSON, CSV or Parquet, or a data set
        on the Hub, ORG/NAME[:SUBSET][:SPLIT].
    out
        A file for the rows with their `completion`, as JSONL; default: they are printed.
    drawing
        How answers are drawn.
    """
    drawn = drawing.checked()
    if (prompt is None) == (file is None):
        raise ConfigError("Give either --prompt TEXT or --file ROWS.")
    if prompt == "":
        raise ConfigError("--prompt is empty: there is nothing to continue. Give a text.")
    if out is not None and file is None:
        raise ConfigError("--out is for the rows of --file. Leave it out.")
    if out is not None and os.path.lexists(out):
        raise ConfigError(f"{out} already exists. Remove it or name another file.")
    check_writable(out)
    rows = None if file is None else _rows(file)
    with _answering(model) as answering:
        if prompt is not None:
            for piece in answering.stream(answering.tokenizer.encode(prompt, special_tokens=True), drawn):
                print(printable(piece), end="", flush=True)
            print()
        elif rows is not None:
            with _opened_for(out) as written:
                for row in _completed(answering, rows, drawn):
                    written.write(json.dumps(row, ensure_ascii=False) + "\n")
                    written.flush()


@contextmanager
def _opened_for(out: Path | None) -> Iterator[TextIO]:
    """Where the rows are written. A file without a row does not stay: it would stop the next try."""
    if out is None:
        yield sys.stdout
        return
    with out.open("x", encoding="utf-8") as file:
        try:
            yield file
        finally:
            if file.tell() == 0:
                out.unlink()


def _rows(text: str) -> DataSet:
    """The rows that a path or a name on the Hub means. Raises ConfigError where there are none."""
    if text == "":
        raise ConfigError("--file is empty: there are no rows. Name a file.")
    with redirect_stdout(sys.stderr):  # standard output is the model's
        files = local_data(text)
    rows = data_set(DataConfig(train=text).located(files))
    if rows.count() == 0:
        raise ConfigError(f"{text}: has no rows.")
    return rows


def _completed(answering: "AnsweringModel", rows: DataSet, drawn: "Drawn") -> Iterator[dict[str, Any]]:
    """Rows with their completions, in order. Raises ConfigError naming file:line."""
    taken, number = list[PromptExample](), 0
    for place, example in read_examples(prompt_example, rows, answering.tokenizer):
        if len(example.prompt_ids) >= answering.context:
            raise ConfigError(
                f"{place.where}: the prompt has {len(example.prompt_ids):,} tokens, and the model's context "
                f"{answering.context:,}. Shorten it or leave the row out."
            )
        taken.append(example)
        if len(taken) == AT_ONCE:
            yield from _answered(answering, taken, number, drawn)
            taken, number = [], number + AT_ONCE
    if taken:
        yield from _answered(answering, taken, number, drawn)


def _answered(
    answering: "AnsweringModel", examples: list[PromptExample], first: int, drawn: "Drawn"
) -> Iterator[dict[str, Any]]:
    answers = answering.answers([example.prompt_ids for example in examples], first, drawn)
    for example, answer in zip(examples, answers, strict=True):
        yield {**json.loads(example.columns), "completion": answer}


@contextmanager
def _answering(path: Path) -> Iterator["AnsweringModel"]:
    """The model of a run or folder, loaded."""
    with _model_folder(path) as folder:
        with phase("model", _tell_beside):
            from prefect_rlhf.rlhf_tasks.answering import AnsweringModel

            answering = AnsweringModel(folder)
        try:
            yield answering
        finally:
            answering.close()


def _tell_beside(line: str) -> None:
    """To standard error: standard output is the model's."""
    print(printable(line), file=sys.stderr, flush=True)


@contextmanager
def _model_folder(path: Path) -> Iterator[Path]:
    """The folder of a model: the one that is named, that of a finished run, or of a run's commit, exported."""
    # In a folder that is there, what is not there is a slip of the keyboard: runs/NAME looks like an id, too.
    if not path.parent.is_dir() and hub_model(str(path)) is not None:
        with redirect_stdout(sys.stderr):  # standard output is the model's
            folder = local_model(str(path))
        yield Path(folder)
        return
    if not (path / FORMAT).is_file():
        if not is_model_folder(path):
            what = (
                "has no model: neither config.json nor adapter_config.json"
                if path.is_dir()
                else "is no folder"
            )
            raise ConfigError(f"{path} {what}. Name the folder of a run or of a model.")
        with redirect_stdout(sys.stderr):
            folder = local_model(str(path))
        yield Path(folder)
        return
    run_folder, config = existing_run_folder(path)
    commit, _ = commit_to_export(run_folder, config)
    # A run that was continued after its end has commits that are newer than the model it left then.
    if is_model_folder(path / "model") and (commit is None or exported_step(run_folder) == commit.step):
        yield path / "model"
        return
    if commit is None:
        raise ConfigError(f"{path} has no model yet: nothing is committed.")
    if "actor" not in commit.manifest.roles:
        raise ConfigError(f"{path} trains no language model, so there is nothing to try.")
    config, _ = fetched(config, run_folder)
    from prefect_rlhf.rlhf_tasks.rank.export import export_commit

    with TemporaryDirectory(dir=run_folder) as place:
        _tell_beside(f"the model after {commit.step} iterations, as it was committed")
        export_commit(commit.folder, config, "actor", Path(place, "model"))
        yield Path(place, "model")
