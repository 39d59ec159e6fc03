"""The samples on one rank: those of the iterations at work, and what calls have made for iterations to come.

Two things outlast an iteration. A call that runs ahead has drawn the samples of later iterations, to their ends. A
call in segments has begun samples that end in any later iteration; until then they are in its places. A commit has
both, by sample and by place, so that ranks in any layout can continue with them.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from prefect_rlhf.rlhf_tasks.algorithms.shared.context import CallOutput
from prefect_rlhf.rlhf_tasks.algorithms.shared.segments import nothing_left
from prefect_rlhf.rlhf_tasks.checkpoint.snapshots import DrawnSamples
from prefect_rlhf.rlhf_tasks.parallel.batch.redistribution import redistribute, survey
from prefect_rlhf.rlhf_tasks.parallel.batch.samples import SampleBatch, SampleStore
from prefect_rlhf.rlhf_tasks.parallel.comm.groups import ProcessGroups
from prefect_rlhf.rlhf_tasks.parallel.layout.transfers import shares
from prefect_rlhf.rlhf_tasks.protocol.messages import GenerationSpec
from prefect_rlhf.rlhf_tasks.spec import CallNode, ExecutionPlan, NodeRequest, Part, PlanNode
from prefect_rlhf.rlhf_tasks.system.durable import ByteCount


class CallSamples:
    """What one rank has of the samples of a call.

    is_on_head  whether this rank is a head of the call's placement
    is_fetched  whether rows are fetched for it
    metrics     iteration -> the call's metrics of its samples. The call's last node of that iteration reports them: a
                call that runs ahead has those of iterations to come
    """

    is_fetched = True

    def __init__(
        self, nodes: Sequence[CallNode], plan: ExecutionPlan, store: SampleStore, groups: ProcessGroups
    ) -> None:
        self.call = nodes[0].call
        self.is_on_head = groups.rank in nodes[0].placement.heads
        self.metrics: dict[int, dict[str, float]] = {}
        self._tallies: dict[int, list[Any]] = {}
        self._nodes = nodes
        self._plan = plan
        self._store = store
        self._groups = groups

    def inputs(self, node: CallNode, whole: Sequence[int]) -> SampleBatch:
        """On a head: this dp rank's samples, with the call's input keys under the names that its function uses.

        whole  ids of the iteration's samples
        """
        mine = self._share(node, node.part.ids(whole))
        return self._store.get(mine, self.call.inputs).renamed(self.call.remap)

    def tally(self, part: Part, iteration: int) -> list[Any]:
        """What the call's earlier parts have left for its metrics of an iteration: `CallContext.tally`."""
        tally = self._tallies.setdefault(iteration, [])
        if part.number == part.of - 1:
            del self._tallies[iteration]
        return tally

    def put(self, node: CallNode, whole: Sequence[int], output: CallOutput) -> None:
        """Store what the call has made on this head; on other ranks there is nothing."""
        if output.batch is not None and self.is_on_head:
            to_store = {inside: outside for outside, inside in self.call.remap.items()}
            self._store.put(output.batch.renamed(to_store).select(*self.call.outputs))

    def for_commit(self, drawn_ahead: Sequence[int]) -> list[SampleBatch]:
        """What a commit has to have of this head. drawn_ahead: ids of all samples that the call has drawn ahead"""
        return self._store.held(drawn_ahead)

    def restore(self, stored: SampleStore, iterations: Iterable[range]) -> None:
        """Take this head's samples from a commit: what the fetch and the call's nodes would have left here.

        stored      what all heads have committed of the call, in any layout
        iterations  the ids of the samples of each iteration that was drawn ahead
        """
        rank, device, call = self._groups.rank, self._groups.device, self.call
        fetch = self._plan.fetches.get(call.name) if self.is_fetched else None
        for ids in iterations:
            if fetch is not None:
                self._store.put(stored.get(shares(fetch.side, ids)[rank], fetch.keys).to(device))
            for node in self._nodes:
                part, lengths = node.part.ids(ids), None
                if node.side.balance == "tokens":
                    lengths = {sample: stored.length(sample, call.token_key) for sample in part}
                keys = (*call.inputs, *call.outputs) if self.is_fetched else call.outputs
                self._store.put(stored.get(shares(node.side, part, lengths)[rank], keys).to(device))

    def _share(self, node: CallNode, ids: Sequence[int]) -> list[int]:
        """This dp rank's samples of a part, or of all. Collective over the heads where tokens are balanced."""
        side, lengths = node.side, None
        if side.balance == "tokens":
            key = self.call.token_key
            lengths = survey(self._store, ids, [key], side.placement.heads, self._groups)[key].rows
        return shares(side, ids, lengths)[self._groups.rank]


class SegmentSamples(CallSamples):
    """The same of a call in segments, which differs in all that follows from its places (docs/adr/0020-segments.md).

    The call finds out by itself which prompts are next, so nothing is fetched for it, and it reads what it has left
    in its places. A sample ends on any head, and is then brought to the head to which it is dealt.
    """

    is_fetched = False
    _left: SampleBatch | None = None  # in this head's places, by the last iteration

    def inputs(self, node: CallNode, whole: Sequence[int]) -> SampleBatch:
        """On a head: what the call has left in its places."""
        return nothing_left(self.call, self._places(), whole[0]) if self._left is None else self._left

    def put(self, node: CallNode, whole: Sequence[int], output: CallOutput) -> None:
        """Store what the call has made on this head, and deal the samples of the iteration. Collective over heads."""
        super().put(node, whole, output)
        if output.left is not None:
            self._left = output.left
        keys, hosts = self.call.outputs, self._plan.devices_per_host
        redistribute(node.side, node.side, whole, keys, self._store, self._groups, hosts)
        mine = set(shares(node.side, whole).get(self._groups.rank, ()))
        self._store.drop([sample for sample in whole if sample not in mine], keys)

    def for_commit(self, drawn_ahead: Sequence[int]) -> list[SampleBatch]:
        """The places too, by their numbers, under keys of their own."""
        left = [] if self._left is None else [self._left.renamed(self.call.left)]
        return [*super().for_commit(drawn_ahead), *left]

    def restore(self, stored: SampleStore, iterations: Iterable[range]) -> None:
        """The places too."""
        in_function = {stored_key: key for key, stored_key in self.call.left.items()}
        self._left = stored.get(self._places(), in_function).renamed(in_function)
        super().restore(stored, iterations)

    def _places(self) -> list[int]:
        """The numbers of this dp rank's places."""
        return shares(self._nodes[0].side, range(self.call.n_places))[self._groups.rank]


def scored_here(plan: ExecutionPlan, node: CallNode, whole: Sequence[int], rank: int) -> dict[int, int]:
    """Of a generate node's samples, those that a rank will score: id -> number in the batch of the scoring call.

    whole  ids of the iteration's samples
    It is empty where that is not known before all are drawn: in segments, and where several dp ranks balance tokens.
    """
    call = node.call
    if call.kind != "generate" or call.segment_tokens:
        return {}
    drawn = next((key for key in call.outputs if call.remap.get(key, key) == "input_ids"), None)
    for other in plan.nodes:
        if isinstance(other, CallNode) and other.part == node.part and drawn in other.call.inputs:
            gives = {other.call.remap.get(key, key) for key in other.call.outputs}
            side = other.side
            if "scores" in gives and (side.balance == "count" or side.placement.strategy.dp == 1):
                mine = shares(side.model_copy(update={"balance": "count"}), node.part.ids(whole)).get(
                    rank, ()
                )
                return {sample: number for number, sample in enumerate(mine)}
    return {}


class RankSamples:
    """All samples on one rank, in a generation of a run.

    store   what fetches, calls and transfers have brought here: by key and global id
    groups  call -> the groups in which it communicates
    moved   counts the bytes that are read from a commit
    """

    def __init__(self, spec: GenerationSpec, groups: Mapping[str, ProcessGroups], moved: ByteCount) -> None:
        plan = spec.plan
        self.store = SampleStore()
        self._rank = spec.rank
        self._n_seqs = plan.n_seqs
        self._iterations = spec.iterations
        self._first_iteration = spec.restore_step or 0
        self._calls: dict[str, CallSamples] = {}
        for name, nodes in plan.calls.items():
            kind = SegmentSamples if nodes[0].call.segment_tokens else CallSamples
            self._calls[name] = kind(nodes, plan, self.store, groups[name])
        calls = [name for name, samples in self._calls.items() if samples.call.outlasts]
        self._drawn = DrawnSamples(Path(spec.run_folder), spec.restore_step, calls, moved)

    def of(self, call: str) -> CallSamples:
        return self._calls[call]

    def worked_on(self, node: PlanNode, request: NodeRequest) -> list[tuple[int, range]]:
        """(iteration, ids of its samples) of those on whose samples a node works: the iteration that is `node.lead`
        ahead, where the run has it.

        A generation of ranks may begin without samples that were drawn ahead. Then its first iteration also makes
        those of all iterations before that one.
        """
        now = request.key.iteration
        catches_up = now == self._first_iteration and not self._drawn.ready
        first = now if catches_up else now + node.lead
        last = min(now + node.lead, self._iterations - 1)
        return [(iteration, self._ids(request, iteration)) for iteration in range(first, last + 1)]

    def for_commit(self, call: str, request: NodeRequest) -> list[SampleBatch]:
        """What a commit after the request's iteration has to have of a call's samples on this head."""
        samples = self.of(call)
        ahead = self._ahead(samples, request.key.iteration + 1)
        return samples.for_commit([sample for i in ahead for sample in self._ids(request, i)])

    def restore(self) -> None:
        """Take what the commit has for iterations to come. All ranks take the metrics, heads also the samples."""
        for name, samples in self._calls.items() if self._drawn.ready else ():
            if samples.call.outlasts:
                samples.metrics = self._drawn.metrics(name)
                n_ahead, first = len(self._ahead(samples, self._first_iteration)), self._drawn.first_sample
                starts = range(first, first + n_ahead * self._n_seqs, self._n_seqs)
                if samples.is_on_head:
                    samples.restore(self._drawn.of(name), [range(i, i + self._n_seqs) for i in starts])

    def end_iteration(self, request: NodeRequest) -> None:
        """Drop the samples of the request's iteration."""
        self.store.drop(self._ids(request, request.key.iteration))

    def _ahead(self, samples: CallSamples, step: int) -> range:
        """The iterations that a call has drawn ahead when a commit of `step` is written."""
        return range(step, min(step + samples.call.lead, self._iterations))

    def _ids(self, request: NodeRequest, iteration: int) -> range:
        """The ids of an iteration's samples."""
        first = request.first_sample + (iteration - request.key.iteration) * self._n_seqs
        return range(first, first + self._n_seqs)
