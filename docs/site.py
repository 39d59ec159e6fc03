"""What mkdocs does beside its own work: the reference is generated, and links to files of the project become names,
or lead to the page that is made of the file.

`mkdocs.yml` names this file as a hook. The reference is made of the configurations' fields, of the commands' help and
of docstrings, so it says what the code says.
"""

import inspect
import json
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import prefect_rlhf
from bench.trl_names import kept_defaults, table
from prefect_rlhf.flows.cli import app
from prefect_rlhf.flows.run import run_folder
from prefect_rlhf.rlhf_tasks.algorithms.registry import algorithm, algorithm_names
from prefect_rlhf.rlhf_tasks.user_code import builtin_environments, builtin_rewards

ROOT = Path(__file__).parents[1]
MADE_OF = {
    "prefect_rlhf/__init__.py": "reference/python.md",
    "rlhf_tasks/user_code/builtin_rewards.py": "reference/rewards.md",
    "rlhf_tasks/user_code/builtin_environments.py": "reference/rewards.md#environments",
    "flows/run/run_folder.py": "reference/run-folder.md",
    "bench/trl_names.py": "reference/trl.md",
}
"""File -> the page that is made of it, to which links to the file lead."""
GIVEN = {"completions", "prompts", "completion_ids", "columns", "self"}
"""Parameters of a reward that no configuration sets."""
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages and, for the navigation, the decisions."""
    pages = {
        "reference/configuration.md": _configuration(),
        "reference/commands.md": _commands(),
        "reference/python.md": _python(),
        "reference/rewards.md": _rewards(),
        "reference/run-folder.md": _run_folder(),
        "reference/trl.md": f"# Names that TRL has, too\n\n{table(kept_defaults())}",
        "adr/index.md": _decisions(),
    }
    for path, content in pages.items():
        files.append(File.generated(config, path, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """A link to a file that is no page becomes the file's name."""
    folder = (ROOT / "docs" / page.file.src_uri).parent

    def inside(link: re.Match[str]) -> str:
        label, target = link.groups()
        if target == "adr/":
            return f"[{label}](adr/index.md)"
        path = (folder / target.partition("#")[0]).resolve()
        if "://" in target or target.startswith("#") or path.is_relative_to(ROOT / "docs"):
            return link[0]
        name = str(path.relative_to(ROOT))
        if name in MADE_OF:
            return (
                f"[{label}]({posixpath.relpath(MADE_OF[name], posixpath.dirname(page.file.src_uri) or '.')})"
            )
        return f"`{name}`" if label.strip("`") in name else f"{label} (`{name}`)"

    return LINK.sub(inside, markdown)


def _decisions() -> str:
    """A list of the decisions, by their titles."""
    pages = sorted((ROOT / "docs" / "adr").glob("0*.md"))
    titles = {page.name: page.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ") for page in pages}
    return "\n".join(["# Decisions", "", *(f"- [{title}]({name})" for name, title in titles.items())])


def _commands() -> str:
    """The commands' help."""
    text = app.generate_docs(output_format="markdown")
    text = re.sub(r"## Table of Contents\n.*?(?=\*\*Commands)", "", text, flags=re.DOTALL)
    return text.replace("# prefect-rlhf\n", "# Commands\n", 1)


def _python() -> str:
    """The names of `prefect_rlhf`, with their docstrings."""
    page = ["# Python", "", "`from prefect_rlhf import ...`: each name is loaded when it is first used."]
    configurations = []
    for name in prefect_rlhf.__all__:
        thing = getattr(prefect_rlhf, name)
        if name.endswith("Config"):
            about = (inspect.getdoc(thing) or "").partition("\n\n")[0]
            configurations.append(f"| `{name}` | `{thing.model_fields['type'].default}` | {_cell(about)} |")
            continue
        page += ["", f"## {name}", "", f"```text\n{name}{_signature(thing)}\n```", "", _prose(thing)]
        for method, function in vars(thing).items() if inspect.isclass(thing) else ():
            if inspect.isfunction(function) and not method.startswith("_"):
                page += ["", f"**`{method}{_signature(function)}`**", "", _prose(function)]
    page += ["", "## Configurations", "", "Their fields are those of a [file](configuration.md).", ""]
    return "\n".join([*page, "| class | `type` | |", "|---|---|---|", *configurations])


def _rewards() -> str:
    """What is built in to judge and to answer, with the arguments that `kwargs` takes."""
    page = [_ABOUT_REWARDS]
    for name in builtin_rewards.__all__:
        page += ["", *_built_in("##", name, getattr(builtin_rewards, name))]
    page += ["", "## Environments", "", "`environment: {factory: builtin:NAME, kwargs: {...}}`."]
    for name in builtin_environments.__all__:
        page += ["", *_built_in("###", name, getattr(builtin_environments, name))]
    return "\n".join(page)


def _built_in(heading: str, name: str, thing: Any) -> list[str]:
    parameters = inspect.signature(thing).parameters.values()
    taken = [p for p in parameters if p.name not in GIVEN and p.kind is not p.VAR_KEYWORD]
    shown = ", ".join(f"{p.name}: {'...' if p.default is p.empty else json.dumps(p.default)}" for p in taken)
    return [f"{heading} {name}", "", *([f"`kwargs: {{{shown}}}`", ""] if taken else []), _prose(thing)]


_ABOUT_REWARDS = """# Built-in rewards and environments

`rewards: [{function: "builtin:NAME", kwargs: {...}}]`. Arguments are shown with their defaults; `...` must be given.
The right answer is the column `answer`, `solution`, `ground_truth`, `label`, `labels` or verl's
`reward_model`, whichever comes first; `column` names another."""


def _run_folder() -> str:
    title, _, tree = (inspect.getdoc(run_folder) or "").partition("\n\n")
    return f"# Run folders\n\n{title}\n\n```text\n{tree}\n```"


def _signature(thing: Any) -> str:
    """Its parameters, without the names of modules in their types."""
    signature = inspect.signature(thing)
    parameters = [p for p in signature.parameters.values() if p.name != "self"]
    text = str(signature.replace(parameters=parameters))
    if len(text) > 60:
        inside = ",\n    ".join(map(str, parameters))
        text = f"(\n    {inside},\n){text[text.rindex(')') + 1 :]}"
    text = re.sub(r"\b(?:[a-z_]+\.)+(?=[A-Z])|(?<=\)) -> None$", "", text)
    return re.sub(r"'([^']+)'", r"\1", text)


def _prose(thing: Any) -> str:
    """A docstring as Markdown: lines such as `name  meaning` become a list."""
    lines: list[str] = []
    in_list = False
    for line in (inspect.getdoc(thing) or "").splitlines():
        item = re.match(r"(\w[\w, ]*?) {2,}(\S.*)", line)
        text = item[2] if item else line.strip()
        text = text.replace("\\", "\\\\").replace("<", "&lt;").replace("```", r"\`\`\`")
        if item:
            lines += [*([] if in_list else [""]), f"- `{item[1]}`: {text}"]
        elif in_list and line.startswith(" "):
            lines[-1] += f" {text}"
        else:
            lines += [*([""] if in_list and text else []), text]
        in_list = bool(item) or (in_list and line.startswith(" "))
    return "\n".join(lines)


def _configuration() -> str:
    """The fields of all configurations, each once, with the algorithms that have it."""
    names = list(algorithm_names())
    rows: dict[tuple[str, str, str], dict[str, list[str]]] = {}
    for name in names:
        for path, (kind, default, about) in _fields(algorithm(name).config.model_json_schema()):
            rows.setdefault((path, kind, about), {}).setdefault(default, []).append(name)
    page = [_ABOUT_CONFIGURATION]
    section = None
    for path, kind, about in sorted(rows, key=lambda row: ("." in row[0], row[0].partition(".")[0])):
        here = path.partition(".")[0] if "." in path else "Top level"
        if here != section:
            section = here
            page += ["", f"## {here}", "", "| key | type | default | meaning | of |", "|---|---|---|---|---|"]
        defaults = rows[path, kind, about]
        most = max(defaults, key=lambda default: len(defaults[default]))
        others = [f"{_names(of, names)}: {default}" for default, of in defaults.items() if default != most]
        default = "; ".join([most, *others])
        having = [name for of in defaults.values() for name in of]
        page.append(f"| `{path}` | {kind} | {default} | {about} | {_names(having, names)} |")
    return "\n".join(page)


_ABOUT_CONFIGURATION = """# Configuration

A run is one YAML file; `type` names the algorithm. Overrides on the command line write the keys of sections with
dots: `prefect-rlhf run grpo --config FILE optimizer.learning_rate=1e-5`. `prefect-rlhf config show FILE` fills in
all defaults."""


def _names(having: list[str], names: list[str]) -> str:
    """Algorithms, by the shorter of two lists: which have it, or which do not."""
    lacking = [name for name in names if name not in having]
    if not lacking:
        return "all"
    return f"all but {', '.join(lacking)}" if len(lacking) < len(having) / 2 else ", ".join(having)


def _fields(schema: dict[str, Any]) -> Iterator[tuple[str, tuple[str, str, str]]]:
    """(path, (type, default, meaning)) of each field of a schema and of the sections in it."""
    definitions = schema.get("$defs", {})

    def walk(section: dict[str, Any], before: str) -> Iterator[tuple[str, tuple[str, str, str]]]:
        for name, field in section.get("properties", {}).items():
            path = f"{before}{name}"
            default = "required" if name in section.get("required", ()) else _value(field.get("default"))
            yield path, (_kind(field, definitions), default, _cell(field.get("description", "")))
            for inner in _sections(field, definitions):
                yield from walk(inner, f"{path}.")

    return walk(schema, "")


def _sections(field: dict[str, Any], definitions: dict[str, Any]) -> list[dict[str, Any]]:
    """The sections that a field may hold."""
    if "$ref" in field:
        return [definitions[field["$ref"].rpartition("/")[2]]]
    kinds = [*field.get("anyOf", ()), *field.get("oneOf", ())]
    if "items" in field:
        kinds.append(field["items"])
    return [section for kind in kinds for section in _sections(kind, definitions)]


def _kind(field: dict[str, Any], definitions: dict[str, Any]) -> str:
    """A field's type in words, with its bounds."""
    if "$ref" in field:
        return "section"
    if kinds := [*field.get("anyOf", ()), *field.get("oneOf", ())]:
        return " or ".join(dict.fromkeys(_kind(kind, definitions) for kind in kinds))
    if "enum" in field:
        return " or ".join(f"`{value}`" for value in field["enum"])
    if "const" in field:
        return f"`{field['const']}`"
    if field.get("type") == "array":
        return f"list of {_kind(field['items'], definitions)}" if field.get("items") else "list"
    bounds = [
        f"{sign} {_number(field[key])}"
        for key, sign in (
            ("exclusiveMinimum", ">"),
            ("minimum", "≥"),
            ("exclusiveMaximum", "<"),
            ("maximum", "≤"),
        )
        if key in field
    ]
    named = str(field.get("type", "any"))
    kind = {"object": "mapping", "null": "nothing", "string": "text"}.get(named, named)
    return f"{kind} ({', '.join(bounds)})" if bounds else kind


def _number(value: float) -> str:
    """With separators where it is a count; powers as such."""
    return f"{value:,}" if isinstance(value, int) and value < 1e12 else f"{value:g}"


def _value(value: Any) -> str:
    return "" if value is None or value in ({}, [], "") else f"`{_cell(str(value))}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
