"""Flow `rlhf-series`: it learns new rows, and its model is promoted only where it is better."""

import asyncio
import json
import os
from pathlib import Path

import pytest
from prefect.client.orchestration import get_client

from prefect_rlhf.flows.recurring import champions
from prefect_rlhf.flows.recurring.beginning import begin_run, open_series
from prefect_rlhf.flows.run.run_folder import taken
from prefect_rlhf.flows.series import judged_samples, rlhf_series
from prefect_rlhf.rlhf_tasks.algorithms.configurations import ConfigError
from prefect_rlhf.rlhf_tasks.algorithms.examples import prepared_rows
from prefect_rlhf.rlhf_tasks.algorithms.series import make_series
from tests.tiny_series import series_document, write_rows


@pytest.fixture
def document(tmp_path):
    return series_document(tmp_path)


def test_the_rows_that_are_judged_are_those_that_are_answered(document, tmp_path):
    document["evaluation"]["data"]["max_rows"] = 30
    config = make_series(document)
    with taken(open_series(config)):
        begun = begin_run(config)
    candidate = begun.stages["candidate"]
    folder = Path(candidate.output_dir, candidate.name)
    (folder / "samples").mkdir(parents=True)
    actor = candidate.models.model_copy(update={"actor": str(tmp_path / "base")})
    prepared_rows(candidate.model_copy(update={"models": actor})).keep(folder)
    lines = (json.dumps({"id": i, "score": 1.0}) + "\n" for i in range(32))  # the last batch repeats two rows
    (folder / "samples" / "0.jsonl").write_text("".join(lines))
    assert [sample["row"] for sample in judged_samples(candidate)] == list(range(30))


def run(document):
    return asyncio.run(rlhf_series(make_series(document)))


async def events() -> list[dict]:
    async with get_client() as client:
        asked = {"filter": {"event": {"prefix": ["prefect-rlhf.series."]}}}
        for _ in range(100):
            answer = await client.request("POST", "/events/filter", json=asked)
            if answer.json()["events"]:
                return answer.json()["events"]
            await asyncio.sleep(0.2)
    return []


@pytest.mark.whole
@pytest.mark.cluster
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("prefect")
@pytest.mark.filterwarnings("ignore::SyntaxWarning", "ignore::DeprecationWarning")
def test_a_model_is_promoted_where_it_is_better_and_the_champion_is_kept_where_it_is_not(
    document, tmp_path, monkeypatch
):
    series, alias = tmp_path / "runs" / "weekly", tmp_path / "runs" / "weekly" / "models" / "champion"
    first = run(document)
    assert (first["decision"], first["champion"], first["rows"]) == ("promoted", "0001", 16)
    assert os.readlink(alias) == "../0001/train/model"
    assert {event["event"] for event in asyncio.run(events())} == {"prefect-rlhf.series.promoted"}

    assert run(document)["decision"] == "nothing new"
    assert champions.runs_of(series) == ["0001"], "a run without new rows leaves no folder"

    write_rows(tmp_path / "rows.jsonl", "a", range(16, 48))

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:  # after the log, before the alias
        patch.setattr(
            champions, "_point_alias", lambda *_: killed() if champions.decision_of(series, "0002") else None
        )
        with pytest.raises((KeyboardInterrupt, Exception)):
            run(document)
    decided = champions.decision_of(series, "0002")
    assert decided is not None
    assert decided["decision"] == "promoted", decided
    assert (decided["rows"], decided["compared_with"]) == (32, "0001"), "the rows added since, and no others"
    assert decided["figures"]["low"] > 0.5
    assert os.readlink(alias) == "../0001/train/model", "the old one until the new one is there"
    assert run(document)["decision"] == "nothing new"
    assert os.readlink(alias) == "../0002/train/model", "the command after a kill carries the decision out"
    assert len(champions.changes_of(series)) == 2
    begun = json.loads((series / "0002" / "train" / "config.json").read_text())
    assert begun["models"]["actor"] == str(series / "0001" / "train" / "model"), "it begins with the champion"

    write_rows(tmp_path / "rows.jsonl", "b", range(48, 80))
    with monkeypatch.context() as patch:  # before the decision
        patch.setattr(champions, "decide", killed)
        with pytest.raises((KeyboardInterrupt, Exception)):
            run(document)
    assert champions.decision_of(series, "0003") is None
    with pytest.raises(
        ConfigError, match=r"run 0003 of .* is compared with the present champion, and not decided"
    ):
        champions.roll_back(series)
    made = (series / "0003" / "train" / "summary.json").stat().st_mtime_ns
    kept = run(document)
    assert (kept["decision"], kept["champion"]) == ("kept", "0002")
    assert "not above the margin 0.5" in kept["reason"]
    assert (series / "0003" / "train" / "summary.json").stat().st_mtime_ns == made, "it was not trained again"
    assert os.readlink(alias) == "../0002/train/model"
    assert run(document)["decision"] == "nothing new", "the rows of a kept champion wait for company"

    assert champions.roll_back(series) == ("0002", "0001")
    assert os.readlink(alias) == "../0001/train/model"
    with pytest.raises(ConfigError, match="no earlier champion to roll back to: 0001 is the only champion"):
        champions.roll_back(series)


def preferences(path: Path, numbers: range) -> None:
    """Append pairs in which the letter a is chosen."""
    rows = [{"prompt": f"{i:x} says ", "chosen": "aaaa", "rejected": "bbbb"} for i in numbers]
    with path.open("a") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("prefect")
@pytest.mark.filterwarnings("ignore::SyntaxWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", ["dpo", "ppo", "sft with adapters"])
def test_any_training_recurs_and_goes_on_from_what_it_left(document, tmp_path, kind):
    training = document["training"]
    training["total_iterations"] = 2
    add = write_rows
    if kind == "dpo":
        (tmp_path / "rows.jsonl").unlink()
        preferences(tmp_path / "rows.jsonl", range(16))
        training["type"] = "dpo"
        add = lambda path, letter, numbers: preferences(path, numbers)  # noqa: E731
    elif kind == "ppo":
        sampled = {"sampling": {"max_completion_length": 4}, "rewards": document["evaluation"]["rewards"]}
        training |= {"type": "ppo", **sampled}
    else:
        training["lora"] = {"rank": 4}
    document["margin"] = 0
    first = run(document)
    assert (first["decision"], first["rows"]) == ("promoted", 16)
    add(tmp_path / "rows.jsonl", "a", range(16, 24))
    second = run(document)
    assert second["compared_with"] == "0001"
    assert second["rows"] == 8
    folder = tmp_path / "runs" / "weekly" / "0002" / "train"
    begun = json.loads((folder / "config.json").read_text())
    assert begun["models"]["actor"] == str(tmp_path / "runs" / "weekly" / "0001" / "train" / "model")
    assert json.loads((folder / "summary.json").read_text())["iterations"] == 2
