"""What ranks take of an algorithm: the functions of its calls, and samples with the values of the data set's keys."""

from collections.abc import Iterable, Sequence
from importlib import import_module

import numpy as np
import torch

from prefect_rlhf.rlhf_tasks.algorithms.registry import Algorithm
from prefect_rlhf.rlhf_tasks.algorithms.shared.context import CallFunction
from prefect_rlhf.rlhf_tasks.config.base import RunConfig
from prefect_rlhf.rlhf_tasks.data.rows import DatasetValue
from prefect_rlhf.rlhf_tasks.data.token_file import StoredNumbers, TokenFile
from prefect_rlhf.rlhf_tasks.parallel.batch.samples import Packed, SampleBatch
from prefect_rlhf.rlhf_tasks.user_code.errors import UserCodeError


def load_functions(algorithm: Algorithm, calls: Iterable[str]) -> dict[str, CallFunction]:
    """The function of each call, by the call's name.

    Raises UserCodeError naming the package when they cannot be imported: restarting the rank would not help.
    """
    try:
        module = import_module(algorithm.functions)
        return {call: getattr(module, call) for call in calls}
    except Exception as fault:
        raise UserCodeError(
            f"the functions of the algorithm {algorithm.name!r} of the package {algorithm.package} cannot be "
            f"imported: {type(fault).__name__}: {fault}"
        ) from fault


def fetch(rows: TokenFile, config: RunConfig, ids: Sequence[int]) -> SampleBatch:
    """The values of samples under each key of the data set. ids: at least one."""
    values = [config.values_of(rows, sample) for sample in ids]
    return SampleBatch(tuple(ids), {key: _packed([each[key] for each in values]) for key in values[0]})


def _packed(values: Sequence[StoredNumbers | DatasetValue]) -> Packed:
    """Token ids as int64, masks as bool, other numbers as float64, text as UTF-8 bytes."""
    if isinstance(values[0], str):
        return Packed.of_texts(str(value) for value in values)
    dtype = {"b": np.bool_, "f": np.float64}.get(np.asarray(values[0]).dtype.kind, np.int64)
    return Packed.of([torch.from_numpy(np.asarray(value).astype(dtype)) for value in values])
