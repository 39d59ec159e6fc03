"""Computes a dumped train call again on one rank, step by step, and says where it first is not what it was, or not
finite.

The function of the call runs as it ran. Steps before the dump are not computed: the function gets their reports.
"""

import copy
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from prefect_rlhf.rlhf_tasks.algorithms.configurations import make_config
from prefect_rlhf.rlhf_tasks.algorithms.functions import load_functions
from prefect_rlhf.rlhf_tasks.algorithms.registry import algorithm
from prefect_rlhf.rlhf_tasks.algorithms.shared.context import CallContext
from prefect_rlhf.rlhf_tasks.algorithms.shared.guards import AnomalyError, Record, guarded
from prefect_rlhf.rlhf_tasks.algorithms.shared.segments import functions_of
from prefect_rlhf.rlhf_tasks.checkpoint.dumps import Dump, read_dump
from prefect_rlhf.rlhf_tasks.checkpoint.manifest import CheckpointError
from prefect_rlhf.rlhf_tasks.checkpoint.snapshots import unpacked
from prefect_rlhf.rlhf_tasks.config.sampling import Samples
from prefect_rlhf.rlhf_tasks.config.training import TrainingConfig
from prefect_rlhf.rlhf_tasks.data.tokenizer import Tokenizer
from prefect_rlhf.rlhf_tasks.parallel.batch.samples import SampleBatch, SampleStore
from prefect_rlhf.rlhf_tasks.parallel.comm.groups import ProcessGroups, device_sets, join_world, leave_world
from prefect_rlhf.rlhf_tasks.parallel.layout.slices import Layout
from prefect_rlhf.rlhf_tasks.parallel.layout.topology import ParallelStrategy, Placement
from prefect_rlhf.rlhf_tasks.parallel.layout.weight_files import read_shape
from prefect_rlhf.rlhf_tasks.parallel.model.stage import Stage
from prefect_rlhf.rlhf_tasks.parallel.model.weights import load_config
from prefect_rlhf.rlhf_tasks.parallel.train.engine import Engine
from prefect_rlhf.rlhf_tasks.parallel.train.state_files import read_shards
from prefect_rlhf.rlhf_tasks.rank.anomalies import PACKAGE
from prefect_rlhf.rlhf_tasks.rank.role_engines import DTYPES, fill, optimizer_settings

ALONE = Placement((0,), ParallelStrategy())
TIMEOUT_S = 60.0  # of collectives: there is nobody to wait for

TOLERANCES = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 3e-2}
"""Relative difference of two layouts' values that rounding explains."""

NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[+-]?\d+)?")
SIX_DIGITS = 1e-5  # relative difference of numbers in a sentence


class StepPair(NamedTuple):
    """A step as it was and as it is.

    replayed  None where it was before the dump, so that it is not computed again
    place     the first tensor in it that is not finite: "" where all are
    """

    number: int
    recorded: Mapping[str, float]
    replayed: Mapping[str, float] | None
    place: str

    def difference(self, tolerance: float) -> str:
        """The first value that rounding does not explain; "" where there is none."""
        if self.replayed is None:
            return ""
        for name, was in self.recorded.items():
            if not _same(was, self.replayed.get(name, math.nan), tolerance):
                return name
        return ""


def _same(was: float, now: float, tolerance: float) -> bool:
    if not (math.isfinite(was) and math.isfinite(now)):
        return was == now or (math.isnan(was) and math.isnan(now))
    return math.isclose(was, now, rel_tol=tolerance, abs_tol=tolerance / 100)


def _same_sentence(was: str, now: str, tolerance: float) -> bool:
    if NUMBER.sub("#", was) != NUMBER.sub("#", now):
        return False
    pairs = zip(NUMBER.findall(was), NUMBER.findall(now), strict=True)
    return all(_same(float(a), float(b), max(tolerance, SIX_DIGITS)) for a, b in pairs)


class Heard(Record):
    """Hears of a call's anomalies and writes nothing down."""

    def __init__(self) -> None:
        self.anomalies: list[str] = []

    def dump(self, anomaly: str) -> None:
        self.anomalies.append(anomaly)


class Replay:
    """A dump that is computed again.

    dump, tolerance  its manifest, and what rounding explains (TOLERANCES)
    steps, anomaly   filled by `run`: the first anomaly that was met, "" where there was none
    Raises CheckpointError where the dump cannot be used, ConfigError where the role's model folder is not there.
    """

    def __init__(self, folder: Path) -> None:
        self.dump: Dump = read_dump(folder, version(PACKAGE))
        self.tolerance = TOLERANCES[self.dump.config["dtype"]]
        self.steps: list[StepPair] = []
        self.anomaly = ""
        self._folder = folder
        self._config = make_config(self.dump.config)
        model = self._config.roles()[self.dump.role].folder
        if self.dump.record.shape.difference(read_shape(model)):
            raise CheckpointError(f"{folder} is of another model than {model} now has. Put that back.")

    def run(self, tell: Callable[[StepPair], None] = lambda pair: None) -> Mapping[str, float]:
        """Compute the call. tell is given each step. Returns its metrics; none where an anomaly has ended it."""
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        join_world(dist.HashStore(), 0, 1, TIMEOUT_S, device)
        try:
            return self._run(device, tell)
        finally:
            leave_world()

    def difference(self, metrics: Mapping[str, float]) -> str:
        """The first that is not as recorded, which rounding does not explain; "" where all is.

        metrics  of `run`
        """
        for pair in self.steps:
            if name := pair.difference(self.tolerance):
                return f"{name} of step {pair.number}"
        recorded = self.dump
        if len(self.steps) != len(recorded.steps):
            return f"the number of steps, {len(self.steps)} instead of {len(recorded.steps)}"
        if not _same_sentence(recorded.anomaly, self.anomaly, self.tolerance):
            return "the anomaly"
        for name in {**recorded.metrics, **metrics}:
            was, now = recorded.metrics.get(name), metrics.get(name)
            if was is None or now is None or not _same(was, now, self.tolerance):
                return f"{name}, {now} instead of {was}"
        return ""

    def _run(self, device: torch.device, tell: Callable[[StepPair], None]) -> Mapping[str, float]:
        dump, config = self.dump, self._config
        assert isinstance(config, TrainingConfig), f"{config.type} runs do not train"
        batch = self._samples().to(device)

        def stepped(report: Mapping[str, float] | None, place: str) -> None:
            number = len(self.steps)
            recorded = dump.steps[number] if number < len(dump.steps) else {}
            self.steps.append(StepPair(number, recorded, report, place))
            tell(self.steps[-1])

        engine = _DumpedEngine(dump, config, self._folder, device, stepped)
        engine.places = [*_not_finite_in(batch), *engine.places]
        heard = Heard()
        context = CallContext(
            config=config,
            iteration=dump.iteration,
            first_sample=dump.first_sample,
            n_seqs=dump.n_seqs,
            micro_batches=dump.micro_batches * dump.record.placement.strategy.dp,
            tokenizer=Tokenizer.from_folder(config.models.tokenizer),
            rewards=cast(Any, None),  # no train call reads them
            run_folder=self._folder,
            where=str,
            columns=tuple,
            record=heard,
        )
        record = algorithm(config.type)
        function = functions_of(load_functions(record, [dump.call]), record.calls(config))[dump.call]
        try:
            with engine.looked_at(), guarded(engine, dump.role, context):
                return function(engine, batch, context).metrics
        except AnomalyError:
            return {}
        finally:
            self.anomaly = next(iter(heard.anomalies), "")

    def _samples(self) -> SampleBatch:
        """The samples of all replicas, in the order of their ids."""
        dump, store, keys = self.dump, SampleStore(), dict[str, None]()
        for stored in dump.files:
            if stored.role == dump.call:
                for batch in unpacked((self._folder / stored.file).read_bytes()):
                    store.put(batch)
                    keys |= dict.fromkeys(batch.data)
        ids = range(dump.first_sample, dump.first_sample + dump.n_seqs)
        return store.get([sample for sample in ids if all(store.has(sample, key) for key in keys)], keys)


class _DumpedEngine(Engine):
    """An engine as a dump has it, which gives the steps before the dump without computing them.

    places   tensors that are not finite, the first first: of the step at work
    stepped  is given each step's report, None for one that is not computed, and the first place
    """

    def __init__(
        self,
        dump: Dump,
        config: TrainingConfig,
        folder: Path,
        device: torch.device,
        stepped: Callable[[Mapping[str, float] | None, str], None],
    ) -> None:
        role, record = config.roles()[dump.role], dump.record
        assert role.optimizer is not None, f"{dump.role} is frozen"
        layout = Layout(record.shape, record.head, ALONE, record.lora)
        groups = ProcessGroups(device_sets(ALONE), TIMEOUT_S, device)
        stage = Stage(
            load_config(role.folder),
            layout,
            ALONE.coordinate(0),
            None,
            device=device,
            dtype=DTYPES[dump.config["dtype"]],
            recompute=config.gradient_checkpointing,
        )
        fill(stage, role, config.seed, (), None)  # adapters stand on the model's own weights
        super().__init__(
            stage,
            layout,
            groups,
            optimizer_settings(role.optimizer),
            version=record.version,
            micro_batch_tokens=config.micro_batch_tokens,
            tokens=dump.tokens,
            counts_drawn=isinstance(config, Samples),
        )
        assert self.master is not None
        files = [folder / stored.file for stored in dump.files if stored.role == dump.role]
        shards = read_shards(files, record.layout, layout, 0, self.master.shard_state())
        self.master.load_shard_state(shards, record.optimizer_step)
        self.state = copy.deepcopy(dump.before)
        slices = stage.trained_slices()
        self.places = [f"weights of {name}" for name, values in slices.items() if not values.isfinite().all()]
        self._dump, self._stepped, self._taken = dump, stepped, 0

    def train_step(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        number, self._taken = self._taken, self._taken + 1
        if number < self._dump.n_before:
            report = dict(self._dump.steps[number])
            self.watch(report)
            return report
        return super().train_step(*args, **kwargs)

    @contextmanager
    def looked_at(self) -> Iterator[None]:
        """Inside, each step looks at the outputs of modules, then at gradients, in the order of the passes."""

        def look(place: str, value: Any) -> None:
            for one in value if isinstance(value, (tuple, list)) else [value]:
                if isinstance(one, Tensor) and one.is_floating_point() and not one.isfinite().all():
                    self.places.append(place)

        hooks = [
            module.register_forward_hook(lambda *seen, name=name: look(f"output of {name}", seen[-1]))
            for name, module in self.stage.named_modules()
            if name
        ]
        hooks += [
            parameter.register_hook(lambda gradient, name=name: look(f"gradient of {name}", gradient))
            for name, parameter in self.stage.trained_slices().items()
        ]

        def watch(report: Mapping[str, float]) -> None:
            if self._taken <= self._dump.n_before:
                self._stepped(None, "")
                return
            forward = [place for place in self.places if not place.startswith("gradient")]
            if not forward and not math.isfinite(report["loss"]):
                forward = ["the loss, of finite outputs"]
            first = next(iter(forward or self.places), "") if report["skipped"] else ""
            self.places = [place for place in forward if not place.startswith(("output", "the loss"))]
            self._stepped(dict(report), first)  # the call's function changes its own

        self.watch = watch
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def _not_finite_in(batch: SampleBatch) -> list[str]:
    """The first sample of each key that has a number which is not finite."""
    places = []
    for key, packed in batch.data.items():
        bad = (
            sample
            for sample, values in zip(batch.ids, packed.split(), strict=True)
            if values.is_floating_point() and not values.isfinite().all()
        )
        if (sample := next(bad, None)) is not None:
            places.append(f"{key} of sample {sample}")
    return places
