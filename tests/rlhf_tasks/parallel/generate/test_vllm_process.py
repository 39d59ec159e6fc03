"""The process of vLLM as ranks see it: all ranks of a replica follow its head, and no start is missed."""

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from prefect_rlhf.rlhf_tasks.parallel.batch.samples import Packed, SampleBatch
from prefect_rlhf.rlhf_tasks.parallel.comm.groups import ProcessGroups, device_sets
from prefect_rlhf.rlhf_tasks.parallel.generate import vllm_process
from prefect_rlhf.rlhf_tasks.parallel.generate.beside import GenerationFault
from prefect_rlhf.rlhf_tasks.parallel.generate.generator import Order, Terms
from prefect_rlhf.rlhf_tasks.parallel.generate.sampling import SamplingParams
from prefect_rlhf.rlhf_tasks.parallel.generate.vllm_process import (
    VISIBLE,
    Vllm,
    VllmProcess,
    visible_together,
)
from prefect_rlhf.rlhf_tasks.parallel.layout.slices import Layout
from tests.rlhf_tasks.parallel.comm.test_reallocation import whole_model
from tests.rlhf_tasks.parallel.generate.test_handover import CPU, LentOnHost, engine_of
from tests.rlhf_tasks.rank.engines_of_others import MODE, FakeVllm
from tests.rlhf_tasks.roles_in_layouts import model, place

TERMS = Terms("/none", "/none", "float32", 17, 64, 1.0, {"python": "/none/python", "kv_bytes": 1})
ORDER = Order(SamplingParams(max_new_tokens=3), 0, 0)


def engine_on(placement: Any, groups: ProcessGroups) -> Any:
    engine = engine_of(Layout(model(), "lm", placement), groups, whole_model(model(), "lm", torch.float32), 0)
    engine.dtype_of_rows, engine.count = torch.float32, lambda flops: None
    return engine


def takes_in_turn(rank, world) -> list[bool]:
    """Two placements of one version: the head's vLLM draws for both, and only the first is on both ranks.

    Between two takes of the first, the head's vLLM has drawn for the second, or has slept: the other rank knows
    nothing of either.
    """
    both, alone = place([0, 1], tp=2), place([0])
    groups = ProcessGroups([*device_sets(both), *device_sets(alone)], 240.0, CPU)
    engine, generator = engine_on(both, groups), FakeVllm(TERMS)
    prompts = SampleBatch((5,), {"prompt_ids": Packed.of([torch.tensor([1, 2])])})
    heads = []
    try:
        for asleep in (False, True):
            generator.take(engine)
            heads.append(generator.draw(prompts, ORDER) is not None)
            if rank == 0 and asleep:
                generator._taken = None  # as `free` on GPUs
            elif rank == 0:
                generator.take(engine_on(alone, groups))
                assert generator.draw(prompts, ORDER) is not None
        generator.take(engine)
        heads.append(generator.draw(prompts, ORDER) is not None)
    finally:
        generator.close()
    return heads


@pytest.mark.dist
def test_all_ranks_of_a_replica_hand_weights_over_when_its_head_needs_them(ranks):
    assert ranks.run(2, takes_in_turn) == [[True] * 3, [False] * 3]


class OnGpus(FakeVllm):
    shares_gpu = staticmethod(lambda engine: True)

    def __init__(self, terms: Terms) -> None:
        super().__init__(terms)
        self._handover.lent = LentOnHost()


def sleeps_between_draws(rank, world, path: str) -> list[bool]:
    """Whether this rank's `take` came back when vLLM had read, with nothing lent any longer; its `free` when it
    slept; and whether its head has drawn again since."""
    os.environ[MODE] = path
    both = place([0, 1], tp=2)
    engine, generator = engine_on(both, ProcessGroups(device_sets(both), 240.0, CPU)), OnGpus(TERMS)
    prompts = SampleBatch((5,), {"prompt_ids": Packed.of([torch.tensor([1, 2])])})
    try:
        generator.take(engine)
        was_read = Path(path).with_suffix(".read").exists() and not generator._handover.lent._lent
        generator.draw(prompts, ORDER)
        generator.free()
        slept = Path(path).exists()
        generator.free()  # of a call that another engine drew for: it sleeps already
        generator.take(engine)
        return [was_read, slept, generator.draw(prompts, ORDER) is not None]
    finally:
        generator.close()


@pytest.mark.dist
def test_no_rank_changes_weights_before_vllm_has_read_them_or_needs_its_gpu_before_vllm_has_left_it(
    ranks, tmp_path: Path
):
    assert ranks.run(2, sleeps_between_draws, str(tmp_path / "slept")) == [
        [True, True, True],
        [True, True, False],
    ]


def seen_by_vllm(rank, world, named: list[str | None]) -> str | None:
    both = place([0, 1], tp=2)
    os.environ.pop(VISIBLE, None)
    if named[rank] is not None:
        os.environ[VISIBLE] = named[rank]
    return visible_together(engine_on(both, ProcessGroups(device_sets(both), 240.0, CPU)))


@pytest.mark.dist
@pytest.mark.parametrize(
    ("named", "together"),
    [(["3", "GPU-7f,3"], "3,GPU-7f"), (["", ""], ""), ([None, "1"], None)],
    ids=["of each its own", "none", "not said"],
)
def test_vllm_sees_the_gpus_of_all_ranks_of_its_replica(ranks, named, together):
    """A rank sees its own alone, or first."""
    assert ranks.run(2, seen_by_vllm, named) == [together] * 2


def drawn_of_nothing(rank, world) -> dict[str, Any]:
    groups = ProcessGroups(device_sets(place([0])), 240.0, CPU)
    generator = FakeVllm(TERMS)
    try:
        generator.take(engine_on(place([0]), groups))
        nothing = SampleBatch((), {"prompt_ids": Packed(torch.empty(0, dtype=torch.int64), ())})
        drawn = generator.draw(nothing, ORDER)
    finally:
        generator.close()
    assert drawn is not None
    return {key: (packed.values.dtype, packed.lengths) for key, packed in drawn.data.items()}


@pytest.mark.dist
def test_an_empty_batch_is_drawn_without_asking_and_keeps_its_types(ranks):
    (drawn,) = ranks.run(1, drawn_of_nothing)
    assert drawn == {
        "input_ids": (torch.int64, ()),
        "response_mask": (torch.bool, ()),
        "old_logprobs": (torch.float32, ()),
        "truncated": (torch.bool, ()),
    }


def test_a_python_that_cannot_be_run_is_a_fault_that_names_the_key():
    with pytest.raises(GenerationFault, match=r"generation\.python: /none/python cannot be run here"):
        VllmProcess("/none/python", {}, 1.0)


def test_an_abort_while_the_process_starts_ends_it(monkeypatch: pytest.MonkeyPatch):
    killed: list[Any] = []
    generator = Vllm(TERMS)

    class Started:
        def __init__(self, *_: Any) -> None:
            other = threading.Thread(target=generator.abort)
            other.start()
            other.join()

        def kill(self) -> None:
            killed.append(self)

    monkeypatch.setattr(vllm_process, "VllmProcess", Started)
    monkeypatch.setattr(vllm_process, "base_of", lambda folder: folder)
    generator._start(type("Engine", (), {"device": CPU, "placement": place([0])})(), None)
    assert len(killed) == 1
