"""Each block of code in the documentation is what it claims to be: configurations are valid, commands are read by the
parsers of the programs that they call, Python is carried out.

A fence's first word says what a block is: sh, yaml, python, toml, or text for what is no code. A block whose program
is not here says `norun` after it, and NORUN counts those: lower a number where one goes.
"""

import re
import shlex
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from click import Command
from cyclopts import App
from distributed.cli.dask_scheduler import main as dask_scheduler
from distributed.cli.dask_worker import main as dask_worker

from prefect_rlhf.flows.cli import app
from prefect_rlhf.rlhf_tasks.algorithms.configurations import (
    make_config,
    make_pipeline,
    stages_of,
)
from prefect_rlhf.rlhf_tasks.algorithms.registry import algorithm
from prefect_rlhf.rlhf_tasks.algorithms.series import make_series
from prefect_rlhf.rlhf_tasks.rehearsal.assumptions import FaultFile
from tests.tiny_runs import write_model, write_prompts

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(page for page in (ROOT / "docs").rglob("*.md") if page.parent.name != "adr"),
]
FENCE = re.compile(r"^```(\w*)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
WIDTH = 102
"""Characters of code that a page of the site shows in a line."""
LANGUAGES = {"sh", "yaml", "python", "toml", "text"}
NORUN = {
    "docs/how-to/kubernetes.md": 1,
    "docs/how-to/several-hosts.md": 1,
    "docs/how-to/slurm.md": 2,
    "docs/how-to/vllm.md": 1,
}
"""Page -> blocks that cannot be tried here."""
CARRIED_OUT = {"docs/tutorial.md"}
"""Pages whose Python another test carries out, in the order of the page."""

SETTINGS = {
    "type": "grpo",
    "models": {"actor": "model"},
    "data": {"train": "rows.jsonl"},
    "sampling": {"max_completion_length": 16},
    "rewards": [{"function": "rewards.py:correct"}],
    "total_iterations": 100,
}
"""What a part of a configuration stands in."""


class Block(NamedTuple):
    """A block of code. place: page and line; marks: the words after the language"""

    place: str
    language: str
    marks: str
    text: str

    @property
    def page(self) -> str:
        return self.place.partition(":")[0]

    @property
    def file(self) -> str | None:
        """The file that it belongs into, by its title or by its first line."""
        title = re.search(r'title="([^"]+)"', self.marks) or re.match(r"# ([\w/]+\.\w+)\n", self.text)
        return title[1] if title else None


def blocks_of(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for fence in FENCE.finditer(text):
        line = text.count("\n", 0, fence.start()) + 1
        yield Block(f"{page.relative_to(ROOT)}:{line}", *fence.groups())


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def of(language: str) -> Any:
    tried = [block for block in BLOCKS if block.language == language and "norun" not in block.marks]
    return pytest.mark.parametrize("block", tried, ids=[block.place for block in tried])


def test_every_block_says_what_it_is():
    assert len(BLOCKS) > 60
    assert not [block.place for block in BLOCKS if block.language not in LANGUAGES]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_stands_between_fences(page: Path):
    """An indented block has no language, so nothing could try it."""
    prose = FENCE.sub("", page.read_text(encoding="utf-8"))
    assert not re.search(r"\n\n {4,}\S", prose)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.place)
def test_no_line_of_code_is_cut_on_the_site(block: Block):
    """A reader should not have to scroll sideways."""
    if block.page.startswith("docs/"):
        assert not [line for line in block.text.splitlines() if len(line) > WIDTH]


def test_blocks_that_are_not_tried_become_fewer():
    assert Counter(block.page for block in BLOCKS if "norun" in block.marks) == NORUN


@of("sh")
def test_commands_are_read_by_their_programs(block: Block):
    checked = subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True, timeout=20)
    assert checked.returncode == 0, checked.stderr
    for words in commands_in(block.text):
        program, *arguments = words
        assert program in PROGRAMS, f"{program}: unknown; mark the block with norun, or add its parser"
        PROGRAMS[program](arguments)


def commands_in(text: str) -> Iterator[list[str]]:
    """The words of each command, without what a shell itself reads."""
    words: list[str] = []
    text = re.sub(r"(?:^|(?<=\s))#[^\n]*", "", text)
    lexer = shlex.shlex(text.replace("\\\n", " ").replace("\n", " ; "), posix=True, punctuation_chars=";|&")
    lexer.commenters, lexer.whitespace_split = "", True
    for word in [*lexer, ";"]:
        if set(word) <= set(";|&"):
            while words and (re.match(r"\w+=", words[0]) or words[0] in ("do", "then")):
                del words[0]
            if words:
                yield words
            words = []
        else:
            words.append(word)


def ours(arguments: list[str]) -> None:
    app.parse_args(arguments, exit_on_error=False, print_error=False)
    match arguments:
        case ["run", name, *others] if name not in ("pipeline", "series", "weighted-regression"):
            record = algorithm(name.replace("-", "_"))
            for change in others:
                if re.match(r"[a-z_.0-9]+=", change):
                    refuse_unknown_key(record.config.model_json_schema(), change.partition("=")[0])


def refuse_unknown_key(schema: dict[str, Any], key: str) -> None:
    """Whether a configuration has a key such as `optimizer.learning_rate`."""
    sections = [schema]
    for name in key.split("."):
        if name.isdecimal():
            continue
        fields = [
            section["properties"][name] for section in sections if name in section.get("properties", {})
        ]
        assert fields, f"{key}: no such key"
        references = re.findall(r"#/\$defs/(\w+)", str(fields))
        sections = [schema["$defs"][reference] for reference in references]


def of_click(command: Command) -> Callable[[list[str]], None]:
    def read(arguments: list[str]) -> None:
        command.make_context(command.name or "", arguments, resilient_parsing=False)

    return read


def of_dask(arguments: list[str]) -> None:
    what, *others = arguments
    of_click({"scheduler": dask_scheduler, "worker": dask_worker}[what])(others)


def of_prefect(arguments: list[str]) -> None:
    from prefect.cli import _app

    prefect: App = _app._app
    prefect.parse_args(arguments, exit_on_error=False, print_error=False)


def of_make(arguments: list[str]) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for word in arguments:
        assert "=" in word or word in targets, f"make {word}: no such target"


def of_pip(arguments: list[str]) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra in re.findall(r"prefect-rlhf\[(\w+)\]|\.whl\[(\w+)\]", " ".join(arguments)):
        assert "".join(extra) in extras


def of_python(arguments: list[str]) -> None:
    match arguments:
        case ["-m", "pytest", *others]:
            paths = [word for word in others if "/" in word]
            assert all((ROOT / path).exists() for path in paths), paths
        case ["-m", module, *_]:
            assert find_spec(module), f"python -m {module}: no such module"
        case ["-c", code, *_]:
            compile(code, "-c", "exec")


def of_shell(arguments: list[str]) -> None:
    """bash -n has read it."""


PROGRAMS: dict[str, Callable[[list[str]], None]] = {
    "prefect-rlhf": ours,
    "dask": of_dask,
    "prefect": of_prefect,
    "make": of_make,
    "pip": of_pip,
    "python": of_python,
    ".venv/bin/python": of_python,
    **dict.fromkeys(("cd", "done", "export", "for", "head", "hf", "mkdir", "source", "tail"), of_shell),
}


@of("yaml")
def test_configurations_are_valid(block: Block):
    document = yaml.safe_load(block.text)
    match document:
        case {"type": "pipeline"}:
            stages_of(make_pipeline(document))
        case {"type": "series"}:
            make_series(document)
        case {
            "type": "weighted_regression"
        }:  # an algorithm that the page adds; tests/test_extending.py runs it
            make_config({**document, "type": "grpo"})
        case {"type": _}:
            make_config(document)
        case {"faults": _} | {"rate": _}:
            FaultFile.model_validate(document)
        case [{"entrypoint": _}, *_]:
            known = yaml.safe_load((ROOT / "deployments" / "prefect.yaml").read_text())["deployments"]
            assert {each["entrypoint"] for each in document} <= {each["entrypoint"] for each in known}
        case _:
            make_config({**SETTINGS, **document})


@of("toml")
def test_projects_can_be_read(block: Block):
    assert tomllib.loads(block.text)


@of("python")
def test_python_is_carried_out(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """But for what stands below a main guard, which trains."""
    code = compile(block.text, block.place, "exec")
    if block.page in CARRIED_OUT:
        return
    beside = [
        other for other in BLOCKS if other.page == block.page and other.language == "python" and other.file
    ]
    for other in beside:
        (tmp_path / str(other.file)).parent.mkdir(exist_ok=True)
        (tmp_path / str(other.file)).write_text(other.text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    names: dict[str, Any] = {"__name__": "page"}
    exec(code, names)
    assert names.keys() - {"__name__", "__builtins__"}, "a block defines or imports something"
    for name, module in list(sys.modules.items()):
        if str(tmp_path) in str(getattr(module, "__file__", "")):
            del sys.modules[name]


@pytest.mark.parametrize(
    ("text", "commands"),
    [
        ("a b # c\nd=1 e", [["a", "b"], ["e"]]),
        (
            "for x in 1 2; do\n  f \\\n  g\ndone | h",
            [["for", "x", "in", "1", "2"], ["f", "g"], ["done"], ["h"]],
        ),
        ("i 'j#k; l' && m", [["i", "j#k; l"], ["m"]]),
    ],
)
def test_commands_are_found_in_what_a_shell_reads(text: str, commands: list[list[str]]):
    assert list(commands_in(text)) == commands


def test_a_key_that_no_configuration_has_is_refused():
    schema = algorithm("grpo").config.model_json_schema()
    refuse_unknown_key(schema, "optimizer.learning_rate")
    with pytest.raises(AssertionError):
        refuse_unknown_key(schema, "optimizer.rate")


SHORTER = {"total_iterations=100": "total_iterations=1", ": 256": ": 8", "data/train.jsonl": "prompts.jsonl"}
"""What a test changes in a script, so that it takes seconds."""


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.timeout(900)
def test_the_scripts_of_the_page_about_python_train(tmp_path: Path):
    """One after another, as they stand, with a tiny model."""
    write_model(tmp_path / "models" / "my-model")
    write_prompts(tmp_path / "prompts.jsonl")
    (tmp_path / "rewards.py").write_text(
        "def correct(completions, **_):\n    return [len(each) for each in completions]\n"
    )
    run = {**SETTINGS, "models": {"actor": "models/my-model"}, "data": {"train": "prompts.jsonl"}}
    run |= {"total_iterations": 1, "sampling": {"max_completion_length": 8}}
    (tmp_path / "grpo.yaml").write_text(yaml.safe_dump(run))
    scripts = [
        block for block in BLOCKS if block.page == "docs/how-to/python.md" and "__main__" in block.text
    ]
    for number, block in enumerate(scripts):
        text = block.text
        for long, short in SHORTER.items():
            text = text.replace(long, short)
        text = text.replace("output_dir=", "max_steps=1, max_completion_length=8, output_dir=")
        (tmp_path / f"script{number}.py").write_text(text)
        ended = subprocess.run(
            [sys.executable, f"script{number}.py"], cwd=tmp_path, capture_output=True, text=True, timeout=280
        )
        assert ended.returncode == 0, f"{block.place}\n{ended.stdout}\n{ended.stderr}"
    assert len(scripts) == 3
    assert (tmp_path / "my-run" / "model").is_dir() or list(tmp_path.glob("my-run*/**/model"))
    assert len(list(tmp_path.glob("runs/*/summary.json"))) == 2
