"""A flipped bit in each kind of movement is found, and the tensor and the ranks are named: between heads, within a
replica, of parameters, of what comes from host memory, of a state that passes through the device, of a commit.

The engine of another process has its own: tests/rlhf_tasks/parallel/generate/test_handover.py.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from prefect_rlhf.rlhf_tasks.checkpoint import snapshots
from prefect_rlhf.rlhf_tasks.checkpoint.snapshots import SnapshotWriter, restore
from prefect_rlhf.rlhf_tasks.parallel.batch import redistribution
from prefect_rlhf.rlhf_tasks.parallel.batch.redistribution import redistribute, share_batch
from prefect_rlhf.rlhf_tasks.parallel.batch.samples import SampleStore
from prefect_rlhf.rlhf_tasks.parallel.comm import reallocation
from prefect_rlhf.rlhf_tasks.parallel.comm.checksums import (
    checksum,
    checksum_of_columns,
    checksums,
    require_same,
)
from prefect_rlhf.rlhf_tasks.parallel.comm.groups import ProcessGroups, device_sets
from prefect_rlhf.rlhf_tasks.parallel.comm.host_memory import HostCopy, ThreadCopier
from prefect_rlhf.rlhf_tasks.parallel.comm.reallocation import reallocate
from prefect_rlhf.rlhf_tasks.parallel.layout.slices import Layout
from prefect_rlhf.rlhf_tasks.parallel.train import optimizer as optimizer_module
from prefect_rlhf.rlhf_tasks.parallel.train.optimizer import Optimizer, OptimizerSettings, StateShard
from prefect_rlhf.rlhf_tasks.protocol.messages import SavedPart
from prefect_rlhf.rlhf_tasks.system.invariants import InvariantError
from tests.rlhf_tasks.algorithms.one_rank import world_of_one
from tests.rlhf_tasks.checkpoint.test_snapshots import commit_parts, generation, save
from tests.rlhf_tasks.parallel.batch.test_redistribution import IDS, KEYS, at, batch
from tests.rlhf_tasks.parallel.comm.test_reallocation import cut, whole_model
from tests.rlhf_tasks.roles_in_layouts import Role, build, fill, model, place, whole_state

CPU = torch.device("cpu")


def flip(values: Tensor, at: int = -1) -> None:
    """Flip the lowest bit of one byte of a tensor."""
    values.view(-1).view(torch.uint8)[at] ^= 1


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("elements", [1, 4095, 4097, 300_000])
def test_any_flipped_bit_changes_a_checksum_and_rows_that_change_places_do(dtype, elements):
    values = (torch.arange(elements) % 251).to(dtype)
    known = checksum(values)
    for place_of_byte in (0, values.nbytes // 2, values.nbytes - 1):
        flipped = values.clone()
        flip(flipped, place_of_byte)
        assert checksum(flipped) != known
    row = 2048 * 8 // values.element_size()
    if elements == 300_000 and dtype not in (torch.bool, torch.uint8):
        assert checksum(torch.cat([values[row : 2 * row], values[:row], values[2 * row :]])) != known
    assert checksum(values.clone()) == known


def test_a_checksum_is_that_of_words_modulo_two_to_the_64th_and_of_no_address():
    """In rows, and the bytes that fill no word before them: each sum is mixed, and weighs an odd number."""

    def mixed(total: int) -> int:
        return total ^ (total % 2**64 >> 32)

    words = (torch.arange(5000) - 2500) * 2**53
    sums = [sum(row) for row in (words[:2048].tolist(), words[2048:4096].tolist(), words[4096:].tolist())]
    known = sum(mixed(total % 2**64) * weight for total, weight in zip(sums, (1, 3, 5), strict=True))
    assert int(checksum(words)) % 2**64 == known % 2**64
    assert int(checksum(torch.tensor([1, 1, 3], dtype=torch.int32))) == 3 + 3 * mixed(1 + 2**32)
    values = torch.arange(10_000, dtype=torch.int16)
    assert checksum(torch.cat([values[:1], values])[1:]) == checksum(values), "which begins within a word"
    assert int(checksum(torch.zeros(0))) == 0


@pytest.mark.parametrize("flips", [2, 3, 4])
def test_highest_bits_of_words_that_are_flipped_in_several_rows_change_a_checksum(flips):
    """Each adds 2**63, whatever odd number it is multiplied by."""
    values = torch.randn(5 * 2048, dtype=torch.float64)
    flipped = values.clone()
    flipped[torch.arange(flips) * 2048] *= -1
    assert checksum(flipped) != checksum(values)


def test_the_checksums_of_many_tensors_are_those_of_each():
    torch.manual_seed(0)
    sizes = (0, 1, 3, 2048, 2049, 5000, 0, 4096)
    tensors = [torch.randn(size, dtype=d) for size in sizes for d in (torch.bfloat16, torch.float32)]
    assert checksums(tensors, CPU).tolist() == [int(checksum(one)) for one in tensors]


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("inner", [1, 3, 4, 8, 40])
def test_the_parts_of_a_matrix_add_up_to_its_checksum_wherever_it_is_cut(dtype, inner):
    torch.manual_seed(0)
    matrix = (100 * torch.randn(3, 5 * inner + 2)).to(dtype)
    whole, size = checksum_of_columns(matrix, 0, inner), matrix.element_size()
    k = 8 // size
    width, total = inner if inner % k == 0 else k, 0
    for row in matrix:
        for number, bits in enumerate(row.view(torch.uint8).view(-1, size).tolist()):
            in_word = int.from_bytes(bytes(bits), "little") << 8 * size * (number % k)
            total += in_word * (2 * (number // width) + 1)
    assert int(whole) % 2**64 == total % 2**64
    for first in range(1, matrix.shape[1] - 1):
        left, middle, right = matrix[:, :first], matrix[:, first : first + 1], matrix[:, first + 1 :].clone()
        sums = [checksum_of_columns(left, 0, inner), checksum_of_columns(middle, first, inner)]
        assert sum(sums) + checksum_of_columns(right, first + 1, inner) == whole
    assert sum(checksum_of_columns(row[None], 0, inner) for row in matrix) == whole
    flip(matrix)
    assert checksum_of_columns(matrix, 0, inner) != whole


def test_rows_of_a_parameter_that_change_places_change_its_checksum():
    matrix = torch.arange(80.0)[None]
    swapped = torch.cat([matrix[:, 40:], matrix[:, :40]], 1)
    assert checksum_of_columns(matrix, 0, 40) != checksum_of_columns(swapped, 0, 40)


def test_the_first_tensor_that_differs_is_named():
    one, other = torch.arange(4.0), torch.arange(4.0)
    sums = checksums([one, other], CPU)
    require_same("move", ["a", "b"], sums, checksums([one, other], CPU))
    flip(other)
    with pytest.raises(InvariantError, match="move: 'b' has other bits than before"):
        require_same("move", ["a", "b"], sums, checksums([one, other], CPU))


def failure(move: Any) -> str:
    try:
        move()
    except InvariantError as error:
        return str(error)
    return ""


def moves(rank: int, world: int) -> list[str]:
    """What is said on a rank of a transfer, a batch for a replica, and parameters, each with one flipped bit; then of
    the same without."""
    groups = ProcessGroups([(0, 1), *device_sets(place([0, 1], tp=2))], 240.0, CPU)
    exchange, broadcast = redistribution.exchange, dist.broadcast
    lay = [Layout(model(), "lm", placement) for placement in (place([0]), place([0, 1], tp=2))]
    damaged, said = False, list[str]()

    def damaging(*how: Any) -> Any:
        arrived = exchange(*how)
        for tensors in arrived.values() if damaged else ():
            flip(tensors[1])
        return arrived

    def damaging_broadcast(tensor: Tensor, **how: Any) -> None:
        broadcast(tensor, **how)
        if damaged and rank == 1 and tensor.dtype == torch.uint8:
            flip(tensor)

    def transfer() -> None:
        store = SampleStore()
        if rank == 0:
            store.put(batch(IDS))
        redistribute(at([0]), at([1]), IDS, KEYS, store, groups, 2)

    def share() -> None:
        share_batch(batch(IDS) if rank == 0 else None, place([0, 1], tp=2), groups)

    def parameters() -> None:
        slices = cut(whole_model(model(), "lm"), lay[0], rank)
        reallocate(lay[0], lay[1], slices, torch.float32, groups, 2)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(redistribution, "exchange", damaging)
        patch.setattr(reallocation, "exchange", damaging)
        patch.setattr(dist, "broadcast", damaging_broadcast)
        for damaged in (True, False):  # noqa: B007 - the functions above read it
            said += [failure(move) for move in (transfer, share, parameters)]
    return said


@pytest.mark.dist
def test_what_arrives_at_another_rank_with_a_flipped_bit_is_named_with_both_ranks(ranks):
    of_sender, of_receiver = ranks.run(2, moves)
    key = list(KEYS)[1]
    assert of_receiver[0] == f"transfer from rank 0 to rank 1: {key!r} has other bits than before"
    assert of_receiver[1].startswith("batch from rank 0 to rank 1: '")
    assert (
        "o_proj.weight' has other bits on ranks [0, 1] than on ranks [0], from which it came"
        in of_receiver[2]
    )
    assert of_receiver[2].startswith("reallocation ")
    assert of_sender == ["", "", of_receiver[2], "", "", ""], (
        "parameters are known to be damaged on every rank"
    )
    assert of_receiver[3:] == [""] * 3


@pytest.mark.parametrize("changes", [False, True])
def test_what_comes_back_from_host_memory_with_a_flipped_bit_is_named(changes):
    made, copies = nn.Linear(7, 3), ThreadCopier()
    parameters = list(made.parameters())

    def use(tensors: Any) -> None:
        for parameter, tensor in zip(parameters, tensors, strict=True):
            parameter.data = tensor

    device = [parameter.data for parameter in parameters]
    named = lambda: {name: parameter.data for name, parameter in made.named_parameters()}  # noqa: E731
    kept = HostCopy(
        [one.clone() for one in device], use, copies, changes, "onload of 'critic' on rank 3", named
    )
    for _ in range(2):
        kept.onload()
        kept.wait()
        if changes:
            made.weight.data.add_(1.0)
        kept.offload()
    flip(kept._on_host[1])
    kept.onload()
    with pytest.raises(
        InvariantError, match="onload of 'critic' on rank 3, from host memory: 'bias' has other bits"
    ):
        kept.wait()
    copies.close()


def test_a_state_in_host_memory_with_a_flipped_bit_is_named_with_its_parameter(monkeypatch):
    monkeypatch.setattr(optimizer_module, "CHUNK", 32)
    settings = OptimizerSettings((0.9, 0.95), eps=1e-8, weight_decay=0.0, max_grad_norm=1.0)
    layout, copies = Layout(model(), "lm", place([0])), ThreadCopier()
    with world_of_one():
        groups = ProcessGroups(device_sets(layout.placement), 240.0, CPU)
        slices = {name: nn.Parameter(torch.ones(layout.slice_shape(name, 0))) for name in layout.held(0)}
        optimizer = Optimizer(slices, layout, groups, settings, copies)

        def step() -> None:
            optimizer.gradients.begin(1)
            sum(one.sum() for one in slices.values()).backward()  # type: ignore[union-attr]
            optimizer.gradients.end_pass()
            optimizer.gradients.end_passes()
            optimizer.apply(1e-3)

        step()
        step()
        name = "model.layers.1.self_attn.o_proj.weight"
        moment = next(s for s in optimizer.shard_state() if (s.kind, s.name) == ("exp_avg_sq", name))
        flip(moment.tensor, 0)
        with pytest.raises(InvariantError, match=f"of rank 0 from host memory: 'exp_avg_sq of .*{name}"):
            step()
        restored = [s._replace(tensor=torch.zeros_like(s.tensor)) for s in optimizer.shard_state()]
        optimizer.load_shard_state(restored, 0)
        step()
    copies.close()


@pytest.mark.parametrize("kind", ["master", "exp_avg"])
def test_a_state_that_a_commit_would_have_with_a_flipped_bit_is_not_written(
    tmp_path: Path, monkeypatch, kind
):
    """Its hash would be right: the bit is lost between the device and host memory."""
    told = list[SavedPart]()
    with world_of_one():
        role, number, name = filled(kind)
        copy = snapshots.host_copies

        def damaging(*how: Any) -> list[Tensor]:
            copies = copy(*how)
            flip(copies[number])
            return copies

        monkeypatch.setattr(snapshots, "host_copies", damaging)
        writer = SnapshotWriter(generation(tmp_path, 0), told.append)
        writer.save("actor", role, 3)
        writer.close()
    (part,) = told
    said = f"InvariantError: 'actor' of rank 0 to host memory: '{kind}/{name}' has other bits than before"
    assert (part.error, part.lasting) == (said, False)
    assert not list(tmp_path.rglob("*.safetensors"))


def test_a_state_that_is_restored_with_a_flipped_bit_is_named(tmp_path: Path, monkeypatch):
    read = snapshots.read_shards

    def damaging(*how: Any) -> Iterator[StateShard]:
        for shard in read(*how):
            if (shard.kind, shard.name) == ("exp_avg", name):
                flip(shard.tensor)
            yield shard

    with world_of_one():
        role, _, name = filled("exp_avg")
        save(tmp_path, role, whole_state(role.layout, torch.float32))
        commit_parts(tmp_path, 1)
        monkeypatch.setattr(snapshots, "read_shards", damaging)
        said = f"restoring 'actor' from .*step-00000003 to ranks \\[0\\]: 'exp_avg/{name}' has other bits"
        with pytest.raises(InvariantError, match=said):
            restore("actor", build(role.layout, role.groups, torch.float32), tmp_path, 3)


def filled(kind: str) -> tuple[Role, int, str]:
    """A role on this process, and of one of its shards the number and the parameter's name."""
    layout, name = Layout(model(), "lm", place([0])), "model.layers.2.mlp.up_proj.weight"
    role = build(layout, ProcessGroups(device_sets(layout.placement), 240.0, CPU), torch.float32)
    fill(role, whole_state(layout, torch.float32))
    return role, [(s.kind, s.name) for s in role.master.shard_state()].index((kind, name)), name
