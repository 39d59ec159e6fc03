"""What the planner predicts of a benchmark's run, from a profile that was measured on its ranks."""

from pathlib import Path

from bench.rank_pool import RankPool, measure_pieces
from flows.run.planning import hardware_of, problem_of
from planner.pricing.calibrate import recalibrated
from planner.pricing.calls import CostModel
from planner.pricing.devices import preset
from planner.pricing.measured import MeasuredProfile
from planner.pricing.plans import PlanPrice, price_plan
from rlhf_tasks.config.base import RunConfig
from rlhf_tasks.parallel.layout.shape import ModelShape
from rlhf_tasks.profiling.measurements import Grid
from rlhf_tasks.profiling.spec import ProfileSpec, pieces_of, profile_plan
from rlhf_tasks.spec import ExecutionPlan

DEVICE = "cpu-slot"


def measured_profile(
    pool: RankPool, model: Path, n_seqs: int, prompt_tokens: int, total_tokens: int
) -> MeasuredProfile:
    """Measure layers and collectives of a model on the ranks, for batches of up to n_seqs sequences.

    model                        its folder
    prompt_tokens, total_tokens  tokens of the longest prompt and of the longest sequence
    """
    n_ranks, shape = pool.n_ranks, ModelShape.from_folder(str(model))
    grid = Grid.around(n_seqs, prompt_tokens, total_tokens, shape.context)
    pieces = pieces_of({str(model): grid}, n_ranks, n_ranks)
    spec = ProfileSpec(dtype="float32", devices_per_host=n_ranks, pieces=pieces)
    plan = profile_plan(pieces, n_ranks, n_ranks)
    per_rank = pool.run(
        measure_pieces, plan.model_dump_json(), spec.model_dump(mode="json"), str(model.parent)
    )
    measured = [piece for pieces, _ in per_rank for piece in pieces]
    dispatch_s = max(seconds for _, seconds in per_rank)
    return MeasuredProfile.of(DEVICE, 1, n_ranks, shape, 4, measured, dispatch_s)


def predicted(config: RunConfig, plan: ExecutionPlan, profile: MeasuredProfile) -> PlanPrice:
    """What a plan of a configuration takes, as `plan: auto` prices it, from the profile."""
    asked = problem_of(config, hardware_of(config)).model
    device = recalibrated(preset(DEVICE), profile)
    model = CostModel(asked.cluster, device, asked.models, asked.workload, [profile])
    return price_plan(plan, model)
