"""What it gains to sample ahead: GRPO on three ranks, with generation, scoring and training on one each.

    python -m bench.asynchronous [--iterations 12] [--staleness 1] [--batch-size 4] [--new-tokens 112]

The reward waits as long as generation takes, as a judge elsewhere would. So two ranks
compute at a time, and two cores are enough. The same ranks run the same plan with and
without staleness. Printed are the seconds per iteration of both; what part of the sum of the stages' times / the
slowest stage the second gains over the first, and what part of the most that its staleness allows (an iteration takes
half of that sum at least); and what the planner predicts: from the times that the nodes took without staleness
(planner.plan.steady_state), and from a measured profile, as `plan: auto` does. The machine should be idle.
"""

import argparse
import json
import tempfile
from pathlib import Path

from bench.demo_models import write_models
from bench.measured_profile import measured_profile, predicted
from bench.rank_pool import RankPool, run_plan
from bench.reality import WARM_UP, node_seconds, seconds_per_iteration
from flows.run.prepare import prepare
from planner.plan.steady_state import steady_state
from planner.pricing.measured import MeasuredProfile
from rlhf_tasks.algorithms.configurations import make_config
from rlhf_tasks.config.base import RunConfig
from rlhf_tasks.spec import ExecutionPlan

REWARD = """
import time

def judge(prompts, completions, **columns):
    time.sleep({seconds})
    return [float(len(set(completion))) for completion in completions]
"""
PROMPT = "{:04d} says so "
N_RANKS = 3
GUESS_S = 0.3  # of the reward, in the run that measures how long generation takes
PLAN = {
    "actor_generate": {"devices": [0]},
    "reward_inference": {"devices": [2]},
    "ref_inference": {"devices": [2]},
    "actor_train": {"devices": [1]},
}
STAGES = {
    "generation": ("actor_generate",),
    "scoring": ("reward_inference", "ref_inference"),
    "training": ("actor_train", "save_actor"),
}


class Bench:
    """The models and the prompts, and the runs on one pool of ranks."""

    def __init__(self, arguments: argparse.Namespace, folder: Path, pool: RankPool) -> None:
        self._given, self._folder, self._pool, self._runs = arguments, folder, pool, 0
        write_models(folder)
        rows = "".join(json.dumps({"prompt": PROMPT.format(i)}) + "\n" for i in range(512))
        (folder / "prompts.jsonl").write_text(rows)

    def priced_s(self, staleness: int, reward_s: float, profile: MeasuredProfile) -> float:
        """Seconds per iteration, as `plan: auto` would predict them."""
        config = self._config(self._folder / f"run-{self._runs}", staleness, reward_s)
        return predicted(config, prepare(config).plan, profile).iteration_time_s

    def profile(self) -> MeasuredProfile:
        """Measured on two ranks, since all compute while it is: a third one would share a core."""
        given, prompt = self._given, len(PROMPT.format(0))
        actor, longest = self._folder / "actor", prompt + given.new_tokens
        with RankPool(2) as pool:
            return measured_profile(pool, actor, given.batch_size, prompt, longest)

    def run(self, staleness: int, reward_s: float) -> tuple[ExecutionPlan, float, dict[str, float]]:
        """(plan, seconds per iteration, node -> mean seconds) after the warm-up."""
        self._runs += 1
        folder = self._folder / f"run-{self._runs}"
        folder.mkdir()
        (folder / "judge.py").write_text(REWARD.format(seconds=reward_s))
        prepared = prepare(self._config(folder, staleness, reward_s))
        prepared.rows.keep(folder)
        iterations = WARM_UP + staleness + self._given.iterations
        document = prepared.config.model_dump(mode="json")
        runs = self._pool.run(run_plan, prepared.plan.model_dump_json(), document, str(folder), iterations)
        return prepared.plan, seconds_per_iteration(runs), node_seconds(runs)

    def _config(self, folder: Path, staleness: int, reward_s: float) -> RunConfig:
        return make_config(
            {
                "type": "grpo",
                "models": {"actor": str(self._folder / "actor")},
                "data": {"train": str(self._folder / "prompts.jsonl")},
                "output_dir": str(self._folder / "runs"),
                "sampling": {"max_completion_length": self._given.new_tokens},
                "rewards": [{"function": f"{folder}/judge.py:judge"}],
                "batch_size": self._given.batch_size,
                "num_generations": 4,
                "beta": 0.01,
                "total_iterations": 1000,
                "staleness": staleness,
                "cluster": {"devices_per_host": N_RANKS},
                "plan": PLAN,
                "planning": {"reward_seconds_per_sequence": reward_s / self._given.batch_size},
            }
        )


def stage_seconds(nodes: dict[str, float]) -> dict[str, float]:
    """Stage -> the seconds of its nodes."""
    return {stage: sum(nodes.get(name, 0.0) for name in names) for stage, names in STAGES.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--iterations", type=int, default=12, help="timed iterations of each run")
    parser.add_argument("--staleness", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=112)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, RankPool(N_RANKS) as pool:
        bench = Bench(arguments, Path(folder), pool)
        _, _, alone = bench.run(0, GUESS_S)
        reward_s = alone["actor_generate"]
        _, in_turn_s, nodes = bench.run(0, reward_s)
        plan, ahead_s, _ = bench.run(arguments.staleness, reward_s)
        profile = bench.profile()
        took = {0: in_turn_s, arguments.staleness: ahead_s}
        off = {k: bench.priced_s(k, reward_s, profile) / seconds - 1 for k, seconds in took.items()}
    predicted_s = steady_state(
        plan, {node.name: nodes.get(node.name, 0.0) for node in plan.nodes}
    ).iteration_time_s
    stages = stage_seconds(nodes)
    total = sum(stages.values())
    most = total / max(stages.values())
    allowed = min(most, 2.0)
    print("stage        " + "  ".join(f"{stage} {seconds:.3f} s" for stage, seconds in stages.items()))
    print(f"staleness 0  {in_turn_s:.3f} s per iteration")
    print(
        f"staleness {arguments.staleness}  {ahead_s:.3f} s per iteration: {in_turn_s / ahead_s:.2f} times as many; "
        f"predicted {predicted_s:.3f} s ({predicted_s / ahead_s - 1:+.0%})"
    )
    print("from a profile: " + ", ".join(f"staleness {k} {wrong:+.0%}" for k, wrong in off.items()))
    gained = total / ahead_s
    print(
        f"sum of stages / slowest: {most:.2f}; gained {gained:.2f}, which is {gained / most:.0%}, and "
        f"{gained / allowed:.0%} of what staleness {arguments.staleness} allows"
    )


if __name__ == "__main__":
    main()
