"""The documentation: links lead somewhere, paths exist, decisions are short."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    [
        *(ROOT / page for page in ("README.md", "CONTRIBUTING.md", "bench/results/faults.md")),
        *(ROOT / "docs").rglob("*.md"),
    ]
)
PACKAGES = ("bench", "blocks", "deployments", "docs", "flows", "planner", "rlhf_tasks", "tests")
NAMED = re.compile(rf"(?<![\w/.-])(?:{'|'.join(PACKAGES)})/[\w./-]*\w")
WORDS_OF_A_DECISION = 250
WORDS_OF_ALL_PAGES = 20_000
"""Of tutorial, how-to pages, explanation, algorithms and models, code included."""
NOT_READ_THROUGH = ("adr", "roadmap.md", "measured.md")


def anchors(page: Path) -> set[str]:
    """What GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_of_a_page_leads_somewhere(page: Path):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if not target.startswith("http"):
            path, _, anchor = target.partition("#")
            linked = (page.parent / path).resolve() if path else page
            assert linked.exists(), f"{target}: no such file"
            assert not anchor or anchor in anchors(linked), f"{target}: no such heading"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_path_that_a_page_names_exists(page: Path):
    for path in NAMED.findall(page.read_text()):
        path = path.partition("/NAME")[0]
        assert (ROOT / path).exists() or (ROOT / f"{path}.py").exists(), path


def test_every_page_that_code_names_exists():
    for package in PACKAGES:
        for file in (ROOT / package).rglob("*.py"):
            for path in re.findall(r"\b(?:docs|bench/results)/[\w/-]+\.md", file.read_text()):
                assert (ROOT / path).exists(), f"{file.relative_to(ROOT)} names {path}"


@pytest.mark.parametrize("page", sorted((ROOT / "docs/adr").glob("*.md")), ids=lambda page: page.stem)
def test_a_decision_is_short(page: Path):
    _title, text = page.read_text().split("\n", 1)
    assert len(text.split()) <= WORDS_OF_A_DECISION


def test_the_pages_together_are_short():
    """Bars of tables are no words, and a table that a test writes is not read through."""
    words = 0
    for page in (ROOT / "docs").rglob("*.md"):
        if page.relative_to(ROOT / "docs").parts[0] not in NOT_READ_THROUGH:
            text = re.sub(r"<!-- written by .*?<!-- end -->", "", page.read_text(), flags=re.DOTALL)
            words += sum(1 for word in text.split() if re.search(r"\w", word))
    assert words <= WORDS_OF_ALL_PAGES


@pytest.mark.slow
@pytest.mark.whole
def test_the_site_is_built_with_a_reference_of_what_the_code_says(tmp_path: Path):
    """Strictly: a link or heading that is not there fails."""
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert built.returncode == 0, built.stderr
    configuration = (tmp_path / "reference/configuration/index.html").read_text()
    assert "optimizer.learning_rate" in configuration
    assert "Peak learning rate." in configuration
    assert "--accept-changes" in (tmp_path / "reference/commands/index.html").read_text()
    assert "folder of a run to continue" in (tmp_path / "reference/python/index.html").read_text()
    assert "numeric_answer" in (tmp_path / "reference/rewards/index.html").read_text()
    assert "metrics.jsonl" in (tmp_path / "reference/run-folder/index.html").read_text()
    assert "../../reference/rewards/" in (tmp_path / "how-to/rewards/index.html").read_text()


def test_the_readme_is_short_and_its_pictures_are_small():
    """A reader sees the limits first, and a clone stays small."""
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) < 120
    assert any("no run has ever had more than one GPU" in line for line in lines[:20])
    for picture in (ROOT / "docs" / "pictures").iterdir():
        assert picture.stat().st_size < 150_000, f"{picture}: make pictures"


def test_figures_have_a_digit_before_the_point():
    for page in (*PAGES, *(ROOT / "bench" / "results").glob("*.md")):
        prose = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        assert not re.findall(r"(?:^|[\s(*~≤+]|\s[-−])\.\d+(?![\w/]|\.\d)", prose, re.MULTILINE), page


@pytest.mark.parametrize(
    "page", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda page: str(page.relative_to(ROOT))
)
def test_no_page_has_marks_of_a_merge(page: Path):
    assert not re.search(r"^(<{7}|>{7}) ", page.read_text(), re.MULTILINE)


def test_no_entry_stands_twice():
    """Merges leave twins."""
    heads = re.findall(r"^- \*\*(.+?)\*\*", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    rows = re.findall(r"^\| (.+?) \|", (ROOT / "docs" / "roadmap.md").read_text(), re.MULTILINE)
    assert len(heads) > 10
    assert len(rows) > 20
    assert sorted({*heads, *rows}) == sorted([*heads, *rows])
