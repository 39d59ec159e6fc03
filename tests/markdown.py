"""What stands in markdown that our artifacts are made of. Import as `tests.markdown`."""

import re


def plain(text: str) -> str:
    """The text that is read where markdown with escapes is drawn."""
    return re.sub(r"\\([!-/:-@\[-`{-~])", r"\1", text).replace("\u200b", "")


def table_of(text: str) -> list[dict[str, str]]:
    """The rows of the one table in a text, by the names of its columns."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    cells = [[plain(cell).strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    head, _rule, *rows = cells
    return [dict(zip(head, row, strict=True)) for row in rows]
