"""A server that draws for all replicas: weights change for all at once, and what it draws with is asked for."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from prefect_rlhf.rlhf_tasks.parallel.batch.samples import Packed, SampleBatch
from prefect_rlhf.rlhf_tasks.parallel.comm.groups import ProcessGroups, device_sets
from prefect_rlhf.rlhf_tasks.parallel.generate import completions, openai_server
from prefect_rlhf.rlhf_tasks.parallel.generate.drawn import Request
from prefect_rlhf.rlhf_tasks.parallel.generate.generator import Order, Terms
from prefect_rlhf.rlhf_tasks.parallel.generate.openai_server import OpenAI
from prefect_rlhf.rlhf_tasks.parallel.generate.sampling import SamplingParams
from tests.loopback import served
from tests.rlhf_tasks.parallel.generate.completion_server import CompletionServer
from tests.rlhf_tasks.parallel.generate.test_handover import CPU
from tests.rlhf_tasks.parallel.generate.test_vllm_process import engine_on
from tests.rlhf_tasks.roles_in_layouts import place

VOCABULARY = 17
ORDER = Order(SamplingParams(max_new_tokens=3), 0, 0)


def terms(folder: Path, url: str) -> Terms:
    base = folder / "base"
    base.mkdir(exist_ok=True)
    (base / "config.json").write_text("{}")
    settings = {"url": url, "model": None, "key": None, "weights_dir": str(folder)}
    return Terms(str(base), str(base), "float32", VOCABULARY, 64, 1.0, settings)


def draws(rank, world, folder, url) -> list[list[int]]:
    """Tokens of one sample on each of two replicas: of version 0 twice, and of version 1."""
    placement = place([0, 1], dp=2)
    groups = ProcessGroups(device_sets(placement), 30.0, CPU)
    engine, generator = engine_on(placement, groups), OpenAI(terms(folder, url))
    prompts = SampleBatch((rank,), {"prompt_ids": Packed.of([torch.tensor([1, 2])])})
    drawn = []
    try:
        for version in (0, 0, 1):
            engine.version = version
            generator.take(engine)
            batch: Any = generator.draw(prompts, ORDER)
            drawn.append(batch["input_ids"].values.tolist())
            assert batch["response_mask"].values.tolist() == [False] * 2 + [True] * 3
            assert generator.version == version
            assert len(list(folder.glob("policy-*"))) == 1, "one copy is kept"
        (ours,) = folder.glob("policy-*")
        other = OpenAI(terms(folder, url))
        other.take(engine)
        if rank == 0:
            assert {ours} < set(folder.glob("policy-*")), "that of another run has a folder of its own"
        other.close()
        assert ours.exists()
    finally:
        generator.close()
    return drawn


@pytest.mark.dist
def test_one_replica_writes_the_weights_of_a_version_and_all_draw_with_them(ranks, tmp_path: Path):
    with served(CompletionServer(VOCABULARY)) as server:
        first, second = ranks.run(2, draws, tmp_path, server.url)
        versions = [body["weight_version"] for body in server.bodies("/update_weights_from_disk")]
        assert [version.partition("-")[0] for version in versions] == ["0", "1", "1"], (
            "each version once in a run"
        )
    for of_rank in (first, second):
        assert of_rank[0] == of_rank[1], "the same weights and seeds"
    assert first[0] != second[0], "seeds are of the samples"
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


def dies(rank, world, folder, url) -> None:
    """A process of a run gives the server weights, and is killed; the next one gives it others."""
    placement = place([0])
    groups = ProcessGroups(device_sets(placement), 30.0, CPU)
    engine, run = engine_on(placement, groups), folder / "run"
    run.mkdir()
    killed, other, following = (
        OpenAI(terms(folder, url)._replace(run_folder=str(at))) for at in (run, folder / "base", run)
    )
    for generator in (killed, other, following):
        before = set(folder.glob("policy-*"))
        generator.take(engine)
        left = before & set(folder.glob("policy-*"))
        assert len(before - left) == (generator is following), "only that of the same run is removed"
        (mine,) = set(folder.glob("policy-*")) - before
        assert (mine / "model.safetensors").exists()
    for generator in (killed, other, following):
        generator.close()


@pytest.mark.dist
def test_the_weights_that_a_killed_process_has_left_are_removed_by_the_next_one_of_the_run(
    ranks, tmp_path: Path
):
    with served(CompletionServer(VOCABULARY)) as server:
        ranks.run(1, dies, tmp_path, server.url)


def test_what_waits_in_the_servers_queue_has_time_while_other_responses_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """One response ends each 0.25 s, all 12 in 3 s; without any, 1.6 s are waited."""
    for module in (openai_server, completions):
        monkeypatch.setattr(module, "STALL_S", 1.0)
    engine: Any = SimpleNamespace(layout=SimpleNamespace(shape=SimpleNamespace(vocab=VOCABULARY)))
    with served(CompletionServer(VOCABULARY, "queue")) as server:
        generator = OpenAI(terms(tmp_path, server.url))
        generator._name = server.version
        said = dict[int, Any]()
        order = ORDER._replace(on_ended=said.__setitem__)
        requests, ids = [Request([1], seed, 3) for seed in range(12)], range(20, 32)
        answers = generator._answers(engine, requests, order, ids)
    assert [answer.tokens[0] for answer in answers] == [seed % VOCABULARY for seed in range(12)]
    assert said == dict(zip(ids, (answer.tokens for answer in answers), strict=True)), "each as it ended"
