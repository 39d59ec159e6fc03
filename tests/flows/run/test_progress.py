"""What a run shows beside its iterations, on a Prefect server that is slow, away, or played: it holds nothing up."""

import asyncio
import logging
import time
from dataclasses import replace
from typing import Any
from uuid import uuid4

import pytest
from httpx import ConnectError

from prefect_rlhf.flows.run import progress as run_view
from prefect_rlhf.flows.run.prepare import prepare
from prefect_rlhf.flows.run.progress import IN_A_ROW, RunView, anomaly_warnings, learning_warnings
from prefect_rlhf.flows.view import prefect_api
from prefect_rlhf.flows.view.artifacts import Page
from prefect_rlhf.rlhf_tasks.protocol.messages import Aborted, Cause, Committed, IterationRan
from tests.rlhf_tasks.plans import small_plan
from tests.tiny_runs import ppo_config

ITERATIONS = 300


class Played:
    """A server: what it is told, each request once it `answers`; away where `away` says so.

    told      the keys of pages, and how many iterations a bar stands at
    pages     key -> in which page's place it was written, each time
    bars      how many iterations were complete, and committed, at each update of the bar
    commits   iterations of the events
    requests  how many there were of events
    """

    def __init__(self, monkeypatch):
        self.answers, self.away, self.requests = asyncio.Event(), False, 0
        self.answers.set()
        self.told, self.commits, self.bars = [], [], []
        self.pages = {}
        monkeypatch.setattr("prefect_rlhf.flows.view.artifacts.tag_flow_run", self.nothing)
        monkeypatch.setattr("prefect_rlhf.flows.view.artifacts.start_progress", self.start_progress)
        monkeypatch.setattr("prefect_rlhf.flows.view.artifacts.show_progress", self.show_progress)
        monkeypatch.setattr("prefect_rlhf.flows.view.artifacts.show_page", self.show)
        monkeypatch.setattr(prefect_api, "prompt_client", lambda: self)
        monkeypatch.setattr(prefect_api, "related_resources_from_run_context", self.related)

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        pass

    async def answer(self):
        if self.away:
            raise ConnectError("nobody there")
        await self.answers.wait()

    async def nothing(self, *_):
        await self.answer()

    async def related(self, _):
        await self.answer()
        return []

    async def start_progress(self, _):
        await self.answer()
        return uuid4()

    async def show_progress(self, _, complete, committed, total):
        await self.answer()
        self.told.append(complete)
        self.bars.append((complete, committed))

    async def show(self, page, written=None):
        await self.answer()
        self.told.append(page.key)
        self.pages.setdefault(page.key, []).append(written)
        return written or uuid4()

    async def request(self, method, path, json):
        await self.answer()
        self.requests += 1
        self.commits += [event["payload"]["iteration"] for event in json]
        assert all(event["event"] == prefect_api.COMMITTED for event in json)


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr("prefect_rlhf.flows.run.progress.get_run_logger", lambda: logging.getLogger("test"))
    return Played(monkeypatch)


@pytest.fixture
def view(tmp_path, expected):
    prepared = replace(prepare(ppo_config(tmp_path)), plan=small_plan(), iterations=ITERATIONS)
    return RunView(prepared, tmp_path, expected.peak_flops_per_s)


def ran(iteration):
    metrics = {"iteration": float(iteration), "reward": 0.5, "time/iteration": 1.0}
    return IterationRan(iteration=iteration, generation=0, metrics=metrics)


def test_a_run_that_cannot_learn_says_so_once(view, server, caplog):
    caplog.set_level(logging.INFO)
    for iteration in range(12):
        metrics = {**ran(iteration).metrics, "reward": 0.0, "reward_std": 0.0}
        view.on_event(IterationRan(iteration=iteration, generation=0, metrics=metrics))
    warned = [record.message for record in caplog.records if "warning:" in record.message]
    assert len(warned) == 1
    assert "every response of 5 iterations has the reward 0.000" in warned[0]


async def commit_all(view, iterations=ITERATIONS):
    await view.begin()
    await commit_each(view, iterations)


async def commit_each(view, iterations):
    for iteration in range(iterations):
        view.on_event(ran(iteration))
        view.on_event(Committed(iteration=iteration, results={}))
        await asyncio.sleep(0)


def test_a_slow_server_holds_no_commit_up_gets_every_event_and_only_the_newest_bar(server, view, monkeypatch):
    """It answers when all is committed: whatever waited for it on the way would wait for ever."""
    monkeypatch.setattr("prefect_rlhf.flows.view.prefect_api.ANSWER_S", 600.0)

    async def scene():
        await view.begin()
        server.answers.clear()
        await commit_each(view, ITERATIONS)
        server.answers.set()
        await view.end()
        await view.close()

    asyncio.run(scene())
    assert server.commits == list(range(ITERATIONS))
    assert server.requests < 30
    bars = [done for done in server.told if isinstance(done, int)]
    assert bars == sorted(bars)
    assert bars[-1] == ITERATIONS
    assert len(bars) < 30
    assert view.api.missing() == {}


def test_events_that_no_server_has_taken_by_the_end_are_counted(server, view, monkeypatch):
    monkeypatch.setattr(run_view, "GIVE_UP_S", 0.1)
    monkeypatch.setattr("prefect_rlhf.flows.view.prefect_api.PAUSE_S", 0.1)
    monkeypatch.setattr(prefect_api, "MOST_EVENTS", 20)

    async def scene():
        server.away = True
        await commit_all(view)
        before = view.api.skipped
        await view.end()
        await view.close()
        return view.api.skipped - before

    assert asyncio.run(scene()) >= 20
    assert view.api.skipped >= ITERATIONS, "those that were given up on the way are counted, too"


def test_events_reach_a_server_that_is_back_by_the_end(server, view, monkeypatch):
    monkeypatch.setattr("prefect_rlhf.flows.view.prefect_api.PAUSE_S", 0.2)

    async def scene():
        server.away = True
        await commit_all(view, 5)
        server.away = False
        await view.end()
        await view.close()

    asyncio.run(scene())
    assert server.commits == list(range(5))


def test_bar_and_curves_show_complete_iterations_before_their_commit_and_drop_what_a_fault_undoes(
    server, view, tmp_path, monkeypatch
):
    drawn = []
    monkeypatch.setattr(run_view, "REFRESH_S", 0.0)
    monkeypatch.setattr(run_view, "REST", 0)
    monkeypatch.setattr(
        run_view.artifacts, "curves_page", lambda rows: drawn.append([r["iteration"] for r in rows])
    )

    async def until(true):
        async with asyncio.timeout(20):
            while not true():
                await asyncio.sleep(0.01)

    async def scene():
        await view.begin()
        for iteration in range(4):
            view.on_event(ran(iteration))
        await until(lambda: server.bars and drawn)
        assert (server.bars[-1], drawn[-1]) == ((4, 0), [0, 1, 2, 3])
        rows = [f'{{"iteration": {iteration}, "reward": 0.5}}\n' for iteration in range(2)]
        (tmp_path / "metrics.jsonl").write_text("".join(rows))  # a commit of two; then it is told
        view.on_event(ran(4))
        await until(lambda: drawn[-1] == [0, 1, 2, 3, 4])
        for iteration in range(2):
            view.on_event(Committed(iteration=iteration, results={}))
        for iteration in range(2, 6):
            view.on_event(Aborted(iteration=iteration, generation=0, cause=Cause("lost", (1,))))
        await until(lambda: server.bars[-1] == (2, 2))
        view.on_event(ran(2))
        await until(lambda: server.bars[-1] == (3, 2) and drawn[-1] == [0, 1, 2])
        view.starting()  # the controller is lost, with what it had not committed
        await until(lambda: server.bars[-1] == (2, 2) and drawn[-1] == [0, 1])
        await view.close()

    asyncio.run(scene())


def test_what_cannot_be_drawn_is_left_out_and_no_outage_of_the_server(server, view, monkeypatch, caplog):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("prefect_rlhf.flows.view.artifacts.plan_graph", full)

    async def scene():
        await view.begin()
        assert (view.api.outage_s, view.api.skipped) == (0, 1)
        await view.end()
        await view.close()

    with caplog.at_level(logging.ERROR):
        asyncio.run(scene())
    assert "No space left on device" in caplog.text


def test_each_page_is_made_once_and_then_written_anew_in_its_place(server, view, monkeypatch):
    monkeypatch.setattr(run_view, "REFRESH_S", 0.0)
    monkeypatch.setattr(run_view, "REST", 0)
    monkeypatch.setattr(run_view.artifacts, "curves_page", lambda rows: Page("curves", "", str(len(rows))))

    async def scene():
        await view.begin()
        for iteration in range(3):
            view.on_event(ran(iteration))
            async with asyncio.timeout(20):
                while len(server.pages.get("curves", ())) <= iteration:
                    await asyncio.sleep(0.01)
        await view.end()
        await view.close()

    asyncio.run(scene())
    first, *later = server.pages["curves"]
    assert first is None
    assert None not in later
    assert len(set(later)) == 1


def test_after_a_slow_drawing_the_next_one_waits_in_proportion(server, view, monkeypatch):
    """Ranks on CPUs compute on the cores that draw."""
    drawn = []
    monkeypatch.setattr(run_view, "REFRESH_S", 0.0)
    monkeypatch.setattr(run_view, "REST", 10)

    def draws(rows):
        drawn.append(time.monotonic())
        time.sleep(0.1)

    monkeypatch.setattr(run_view.artifacts, "curves_page", draws)

    async def scene():
        await view.begin()
        async with asyncio.timeout(20):
            for iteration in range(1000):
                view.on_event(ran(iteration))
                await asyncio.sleep(0.01)
                if len(drawn) > 1:
                    break
        await view.close()

    asyncio.run(scene())
    assert drawn[1] - drawn[0] >= 1.0


HEALTHY = {
    "reward": 0.4,
    "reward_std": 0.3,
    "frac_reward_zero_std": 0.5,
    "completions/clipped_ratio": 0.9,
    "completions/mean_length": 100.0,
    "kl": 5.0,
}
ZERO = {"reward": 0.0, "reward_std": 0.0, "frac_reward_zero_std": 1.0}
EQUAL_GROUPS = {"frac_reward_zero_std": 1.0}
TRUNCATED = {"completions/clipped_ratio": 1.0}
FAR = {"kl": 60.0}


def rows(*changes: dict[str, Any]) -> list[dict[str, Any]]:
    return [{**HEALTHY, **change} for change in changes]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ([{}] * 60, {}),
        ([ZERO] * (IN_A_ROW - 1), {}),
        ([ZERO] * IN_A_ROW, {"equal rewards": "every response of 5 iterations has the reward 0.000"}),
        ([ZERO, {}, *[ZERO] * (IN_A_ROW - 1)], {}),
        (
            [{"reward": 1.0, "reward_std": 0.0, "frac_reward_zero_std": None}] * 9,
            {"equal rewards": "reward 1.000"},
        ),
        ([EQUAL_GROUPS] * IN_A_ROW, {"equal rewards": "all responses to a prompt have equal rewards"}),
        (
            [TRUNCATED] * IN_A_ROW,
            {"truncated": "all are cut at 100 tokens. Raise sampling.max_completion_length"},
        ),
        ([{}, *[FAR] * IN_A_ROW], {"kl": "0.6 nats a token, above 0.5 for 5 iterations"}),
        ([FAR] * 60, {}),  # far from the start, as a teacher is
        ([{}, *[FAR] * IN_A_ROW, {}], {}),
        ([{"importance/kl": 0.2}] * 5, {"drawn by another": "0.2 nats a token (importance/kl), above 0.05"}),
        ([{**ZERO, **TRUNCATED}] * 5, {"equal rewards": "samples/", "truncated": "sampling.stop"}),
        ([dict.fromkeys(HEALTHY)] * 9, {}),
    ],
)
def test_a_warning_needs_five_iterations_that_agree(changes: list[dict[str, Any]], said: dict[str, str]):
    so_far = rows(*changes)
    found = learning_warnings(so_far[0], so_far)
    assert found.keys() == said.keys()
    for what, part in said.items():
        assert part in found[what]
        assert "\n" not in found[what]


def test_an_anomaly_is_said_at_once_with_the_command_that_computes_it_again():
    row = {
        "skipped_steps/actor": 2.0,
        "skipped_steps/critic": 0.0,
        "anomaly/kl": 1.0,
        "anomaly/equal_rewards": 0.0,
    }
    dumps = [f"runs/a/anomalies/{name}" for name in ("actor-iteration-00000003", "critic-iteration-00000001")]
    said = anomaly_warnings(row, 3, dumps)
    assert list(said) == ["skipped_steps/actor", "anomaly/kl"]
    for sentence in said.values():
        assert sentence.endswith("prefect-rlhf replay runs/a/anomalies/actor-iteration-00000003")
    of_critic = anomaly_warnings({"skipped_steps/critic": 1.0}, 1, dumps)["skipped_steps/critic"]
    assert of_critic.endswith(f"prefect-rlhf replay {dumps[1]}")
    for sentence in anomaly_warnings(row, 4, dumps).values():
        assert "replay" not in sentence, "no dump is of this iteration"
    assert anomaly_warnings(HEALTHY, 3, dumps) == {}


def test_runs_without_these_metrics_are_told_nothing():
    assert learning_warnings({"loss/sft": 2.0}, [{"loss/sft": 2.0}] * 60) == {}
