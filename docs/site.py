"""What mkdocs does beside its own work: the reference is generated, and links to files of the project become names.

`mkdocs.yml` names this file as a hook. The reference is made of the configurations' fields, of the commands' help and
of docstrings, so it says what the code says.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from prefect_rlhf.flows.cli import app
from prefect_rlhf.rlhf_tasks.algorithms.registry import algorithm, algorithm_names

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages and, for the navigation, the decisions."""
    pages = {
        "reference/configuration.md": _configuration(),
        "reference/commands.md": _commands(),
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
    return re.sub(r"## Table of Contents\n.*?(?=\*\*Commands)", "", text, flags=re.DOTALL)


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
        f"{sign} {field[key]:g}"
        for key, sign in (
            ("exclusiveMinimum", ">"),
            ("minimum", "≥"),
            ("exclusiveMaximum", "<"),
            ("maximum", "≤"),
        )
        if key in field
    ]
    kind = {"object": "mapping", "null": "nothing", "string": "text"}.get(
        field.get("type", ""), field.get("type", "any")
    )
    return f"{kind} ({', '.join(bounds)})" if bounds else kind


def _value(value: Any) -> str:
    return "" if value is None or value in ({}, [], "") else f"`{_cell(str(value))}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
