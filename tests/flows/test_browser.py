"""What people see of a run in the Prefect UI, in a real browser at 1440x900, in both versions of the UI.

One server and one browser for all. The pages are made by our own functions of what a run has written
(recorded_run.json: 12 iterations of `tests.tiny_runs.ppo_config` on two ranks) and by Prefect's `deploy`.
"""

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from prefect import flow
from prefect.client.orchestration import get_client

from prefect_rlhf.flows.ppo import rlhf_ppo
from prefect_rlhf.flows.view import artifacts
from prefect_rlhf.flows.view.clocks import spans_of
from prefect_rlhf.rlhf_tasks.algorithms.configurations import make_config
from prefect_rlhf.rlhf_tasks.spec import ExecutionPlan
from tests.browser import PATIENCE_MS, chromium, logged_in
from tests.tiny_reward import length_reward

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = [
    pytest.mark.whole,
    pytest.mark.cluster,
    pytest.mark.timeout(600),
]
BOTH = pytest.mark.parametrize("ui", ["v1", "v2"])

ROOT = Path(__file__).parents[2]
PREFECT_FILE = ROOT / "deployments" / "prefect.yaml"
RECORDED = json.loads(Path(__file__).with_name("recorded_run.json").read_text(encoding="utf-8"))
KEYS = ("execution-plan", "progress", "curves", "device-timeline", "completions", "planned-and-measured")
PICTURES = ("execution-plan", "curves", "device-timeline")
SIZES = """() => {
    const sizes = [...document.images].map(one => [one.clientWidth, one.clientHeight]).filter(([width]) => width);
    return sizes.length ? sizes : null;
}"""
HOSTILE = (
    "![x](http://picture.invalid/x.png) <img src=http://picture.invalid/y.png> **b** `c` | pipe\n\n# head"
)


@flow(name="shown", persist_result=False)
async def shown() -> None:
    """Every artifact of a run, of recorded rows."""
    plan = ExecutionPlan.model_validate(RECORDED["plan"])
    samples = [dict(sample) for sample in RECORDED["samples"]]
    samples[0]["completion"] = HOSTILE
    samples[1]["prompt"] = "The quick brown fox jumps over the lazy dog, " * 12
    samples[2]["completion"] = "onelongword" * 20
    pages = (
        artifacts.plan_page(plan),
        artifacts.curves_page(RECORDED["metrics"]),
        artifacts.timeline_page(spans_of(plan, RECORDED["lineage"])),
        artifacts.completions_page(samples),
    )
    for page in pages:
        assert page is not None
        await artifacts.show_page(page)
    progress = await artifacts.start_progress(12)
    await artifacts.show_progress(progress, 8, 5, 12)
    await artifacts.show_planned_and_measured(RECORDED["planned_and_measured"])


@pytest.fixture(scope="module")
def addresses(prefect, tmp_path_factory) -> dict[str, str]:
    """Path of each artifact and of each deployment's form, by key and by flow."""
    asyncio.run(shown())
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith("PREFECT_")},
        **prefect.environment,
        "PREFECT_HOME": str(tmp_path_factory.mktemp("client")),
        "PYTHONPATH": str(ROOT),
    }
    for command in (
        ("work-pool", "create", "rlhf-local", "--type", "process"),
        ("--no-prompt", "deploy", "--all", "--prefect-file", str(PREFECT_FILE.relative_to(ROOT))),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "prefect", *command],
            cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0 or "already exists" in done.stdout + done.stderr, (
            f"{command}\n{done.stdout}\n{done.stderr}"
        )

    async def found() -> dict[str, str]:
        async with get_client() as client:
            made = sorted(await client.read_artifacts(), key=lambda artifact: artifact.created)
            names = {found.id: found.name for found in await client.read_flows()}
            deployed = await client.read_deployments()
        places = {artifact.key: f"/artifacts/artifact/{artifact.id}" for artifact in made if artifact.key}
        forms = {names[each.flow_id]: f"/deployments/deployment/{each.id}/run" for each in deployed}
        return {**places, **forms}

    return asyncio.run(found())


@pytest.fixture(scope="module")
def browser(addresses) -> "Iterator[Browser]":
    with chromium() as started:
        yield started


@pytest.fixture(scope="module")
def pages(browser, prefect) -> "Iterator[dict[str, Page]]":
    """A page for each version of the UI, logged in by the form, with what the terminal prints."""
    opened = {ui: logged_in(browser, prefect, ui) for ui in ("v1", "v2")}
    yield opened
    for page in opened.values():
        page.context.close()


@pytest.fixture
def visit(pages, prefect, addresses, ui):
    """Open a page of the version of the UI that is tested; gives it when it has shown a text."""

    def go(path: str, awaited: str) -> "Page":
        page = pages[ui]
        page.goto("about:blank")  # nothing of the page before may be taken for this one's
        page.goto(f"{prefect.ui_url}{'/v2' if ui == 'v2' else ''}{path}")
        page.get_by_text(awaited, exact=False).first.wait_for()
        return page

    return go


AWAITED = {
    "execution-plan": "Each box names its devices",
    "progress": "8 of 12 iterations, 5 committed",
    "curves": "After 12 iterations",
    "device-timeline": "Devices over time",
    "completions": "Sample 8",
    "planned-and-measured": "memory of device 1",
}

CUT_OFF = """
() => [...document.querySelectorAll('table, h1, h3, blockquote, p, img')].filter(shown => {
    const right = shown.getBoundingClientRect().right;
    for (let around = shown; around; around = around.parentElement)
        if (right > around.getBoundingClientRect().right + 2 && getComputedStyle(around).display !== 'contents')
            return true;
    return false;
}).map(shown => shown.outerHTML.slice(0, 200))
"""
"""What reaches beyond something around it."""


@pytest.mark.parametrize(
    ("ui", "key"),
    [
        *(("v2", key) for key in KEYS),
        # of the version before: a picture, a table with text of samples; the others are made of the same
        *(("v1", key) for key in ("execution-plan", "completions")),
        *(
            pytest.param("v1", key, marks=pytest.mark.slow)
            for key in KEYS
            if key not in ("execution-plan", "completions")
        ),
    ],
)
def test_an_artifact_is_whole_and_can_be_read(visit, addresses, ui, key):
    page = visit(addresses[key], AWAITED[key])
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    if key in PICTURES:
        page.wait_for_function(SIZES)
    text = page.inner_text("body")
    assert page.evaluate(CUT_OFF) == []
    assert "[object Object]" not in text
    assert '{"' not in text
    assert not re.search(r"\d\.\d{6,}", text), "figures have digits that nobody reads"
    if key in PICTURES:
        # The page may draw it anew at any time.
        ((width, height),) = page.wait_for_function(SIZES).json_value()
        assert width > 650
        assert height > 250
    else:
        assert page.evaluate(SIZES) is None
    assert not [url for url in asked if "invalid" in url], "a sample's text made the browser ask elsewhere"


@BOTH
def test_completions_are_text_with_a_column_for_each_reward(visit, addresses, ui):
    from playwright.sync_api import expect

    page = visit(addresses["completions"], AWAITED["completions"])
    heads = ["sample", "score", "length_reward", "vowels", "reward model", "truncated"]
    # Both wait: the page draws its table anew when its data come.
    expect(page.locator("th")).to_have_text(heads, timeout=PATIENCE_MS)
    page.wait_for_function(
        "text => document.body.innerText.replaceAll('\\u200b', '').includes(text)", arg=HOSTILE.split("\n")[0]
    )


@BOTH
def test_the_list_of_deployments_tells_them_apart(visit, addresses, ui):
    page = visit("/deployments", "planning only")
    tags = {tag for each in yaml.safe_load(PREFECT_FILE.read_text())["deployments"] for tag in each["tags"]}
    assert len(tags) > 10, "they are on two pages"
    shown = shown_of(page, tags)
    page.locator("xpath=(//*[normalize-space(.)='Page 1 of 2'])[last()]/following::button[1]").click()
    page.get_by_text("Page 2 of 2", exact=True).wait_for()
    page.get_by_text("RLOO training", exact=True).first.wait_for()
    assert shown | shown_of(page, tags) == tags


def shown_of(page: "Page", texts: Iterable[str]) -> set[str]:
    """Those of the texts that stand on the page."""
    return {text for text in texts if page.get_by_text(text, exact=True).first.is_visible()}


def submitted(page: "Page") -> dict[str, Any]:
    """Submit a form, again where the server was busy (503); the parameters of the run that it has made of it."""
    while True:
        with page.expect_response(lambda response: response.url.endswith("/create_flow_run")) as answer:
            page.get_by_role("button", name="Submit").click()
        if answer.value.status != 503:
            break
    assert answer.value.status == 201, answer.value.text()
    return answer.value.json()["parameters"]


def fill(page: "Page", label: str, value: str) -> None:
    """Fill the box below a label."""
    box = "self::textarea or self::input[@type='number' or @type='text' or not(@type)]"
    page.locator(f"xpath=(//*[normalize-space(text())='{label}']/following::*[{box}])[1]").fill(value)


@BOTH
def test_without_a_configuration_the_form_of_ppo_starts_the_demo(visit, addresses, ui):
    page = visit(addresses["rlhf-ppo"], "Without one the demo runs")
    assert page.get_by_text("The demo", exact=True).is_visible()
    assert submitted(page) == {"config": None, "run_folder": None}


@BOTH
def test_a_form_with_its_required_fields_only_makes_a_run(visit, addresses, ui):
    page = visit(addresses["rlhf-ppo"], "Without one the demo runs")
    page.get_by_text("PPO configuration", exact=True).click()
    for label, value in {
        "Actor": "runs/sft/model",
        "Train": "data/prompts.jsonl",
        "Max completion length": "32",
        "Total iterations": "3",
    }.items():
        fill(page, label, value)
    config = submitted(page)["config"]
    rewards = [{"function": f"{length_reward.__module__}:length_reward"}]
    checked = rlhf_ppo.validate_parameters({"config": {**config, "rewards": rewards}})  # as the flow gets it
    made = checked["config"]
    assert made.models.actor == "runs/sft/model"
    assert made.sampling.max_completion_length == 32
    assert made.total_iterations == 3
    assert made == make_config(
        {
            "type": "ppo",
            "models": {"actor": "runs/sft/model"},
            "data": {"train": "data/prompts.jsonl"},
            "sampling": {"max_completion_length": 32},
            "total_iterations": 3,
            "rewards": rewards,
        }
    )
