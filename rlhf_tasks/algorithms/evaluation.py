"""The evaluation in a training run: answers to held-out rows with the weights after a train_step."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from prefect_rlhf.rlhf_tasks.algorithms.evaluate import EvaluateConfig
from prefect_rlhf.rlhf_tasks.algorithms.functions import fetch
from prefect_rlhf.rlhf_tasks.algorithms.held_out import (
    COMPLETIONS,
    HELD_OUT,
    completions_of,
    evaluation_of,
    held_out_sets,
    rows_at_once,
)
from prefect_rlhf.rlhf_tasks.algorithms.shared.context import CallContext
from prefect_rlhf.rlhf_tasks.algorithms.shared.generation import draw, sampling_params
from prefect_rlhf.rlhf_tasks.algorithms.shared.scores import refuse_all_skipped, score, write_skipped
from prefect_rlhf.rlhf_tasks.config.base import RunConfig
from prefect_rlhf.rlhf_tasks.data.token_file import TokenFile
from prefect_rlhf.rlhf_tasks.data.tokenizer import Tokenizer
from prefect_rlhf.rlhf_tasks.parallel.batch.micro_batch import MicroBatch
from prefect_rlhf.rlhf_tasks.parallel.batch.redistribution import share_batch
from prefect_rlhf.rlhf_tasks.parallel.batch.samples import SampleBatch
from prefect_rlhf.rlhf_tasks.parallel.generate.generator import BuiltIn, Generator
from prefect_rlhf.rlhf_tasks.parallel.layout.transfers import shares
from prefect_rlhf.rlhf_tasks.parallel.train.engine import Engine
from prefect_rlhf.rlhf_tasks.spec import DataSide
from prefect_rlhf.rlhf_tasks.user_code.environments import EnvironmentProcess
from prefect_rlhf.rlhf_tasks.user_code.rewards import Fault, RewardProcess

PURPOSE = "evaluation"
"""Purpose of the random numbers of sampled answers; those of training samples have another purpose."""


class Evaluation:
    """The evaluation that a run's section `evaluation` configures, on one rank.

    config      the run's
    run_folder  where its held-out rows lie
    rewards, environment  this rank's helper processes for those of the evaluation
    """

    def __init__(
        self,
        config: RunConfig,
        run_folder: Path,
        rewards: RewardProcess,
        tokenizer: Tokenizer,
        environment: EnvironmentProcess | None = None,
        generator: Generator | None = None,
    ) -> None:
        answers = evaluation_of(config)
        self._batch_size, self._completions = rows_at_once(config), completions_of(config)
        self._rows = {name: TokenFile.open(run_folder / name) for name in held_out_sets(config)}
        self._answers = answers and HeldOutAnswers(
            answers, self._rows[HELD_OUT], rewards, tokenizer, run_folder, environment, generator
        )

    def metrics(self, engine: Engine, iteration: int, at_start: bool = False) -> dict[str, float]:
        """The metrics of `HeldOutAnswers.metrics` if rewards score answers, and eval/loss if it is configured.

        Equal on all ranks of the engine's placement, over which it is collective.

        at_start  whether it is the evaluation before the first iteration, whose number is `iteration`
        """
        metrics: dict[str, float] = {}
        if self._answers is not None:
            kind = "evaluation-at-start-" if at_start else "evaluation-"
            metrics |= self._answers.metrics(engine, iteration, kind)
        if self._completions is not None:
            rows = self._rows[COMPLETIONS]
            metrics["eval/loss"] = completion_loss(engine, rows, self._completions, self._batch_size)
        return metrics


class HeldOutAnswers:
    """The held-out rows to answer, and the rewards that score the answers, on one rank.

    config   what is evaluated, see `rlhf_tasks.algorithms.held_out.evaluation_of`
    rows     the tokenised held-out rows
    rewards, environment  this rank's helper processes for those of `config`
    """

    def __init__(
        self,
        config: EvaluateConfig,
        rows: TokenFile,
        rewards: RewardProcess,
        tokenizer: Tokenizer,
        run_folder: Path,
        environment: EnvironmentProcess | None = None,
        generator: Generator | None = None,
    ) -> None:
        self._generator = generator or BuiltIn()
        self._config, self._rows, self._rewards, self._tokenizer = config, rows, rewards, tokenizer
        self._environment, self._run_folder = environment, run_folder

    def metrics(self, engine: Engine, iteration: int, kind: str) -> dict[str, float]:
        """Answer all held-out rows and score the answers. Collective over the engine's placement.

        kind  begins the name of the file that lists skipped answers
        Returns, equal on every rank, over all answers: eval/reward, the mean score; eval/<name>/mean of each reward
        that has judged one;
        eval/mean_length in tokens; eval/clipped_ratio, the fraction without an end token; with `on_reward_error:
        skip` eval/skipped_samples, the answers that a reward failed on, whose score is 0. An answer depends only on
        the weights, its row and (seed, iteration, number of the answer), not on the layout.
        Raises RewardError as `score` does, and when a reward failed on every answer.
        """
        context = CallContext(
            config=self._config,
            iteration=iteration,
            first_sample=0,
            n_seqs=len(self._rows) * self._config.num_generations,
            micro_batches=1,
            tokenizer=self._tokenizer,
            rewards=self._rewards,
            environment=self._environment,
            run_folder=self._run_folder,
            where=lambda sample: self._rows.where(self._config.row_of(self._rows, sample)),
            columns=lambda: self._rows.columns,
            generator=self._generator,
        )
        names = self._config.score_names
        sums = torch.zeros(4 + 2 * len(names), dtype=torch.float64)  # over this head's answers
        faults: dict[int, Fault] = {}
        for answered in self._answered(engine, context):
            scored = score(engine, answered, context, all_judged=False)
            assert scored is not None, "this rank is a head"
            counts = [
                len(answered),
                answered["response_mask"].values.sum(),
                answered["truncated"].values.sum(),
            ]
            faults |= scored.faults
            judged = [[v for v in scored.rewards[name] if v is not None] for name in names]
            by_name = [figure for values in judged for figure in (sum(values), len(values))]
            sums += torch.tensor([*counts, scored.scores.sum(), *by_name], dtype=torch.float64)
        sums = torch.cat([sums, sums.new_tensor([len(faults)])])
        n, tokens, clipped, total, *by_name, skipped = engine.sum_over_dp(sums.to(engine.device)).tolist()
        if engine.is_head:
            write_skipped(engine, faults, context, kind)
            refuse_all_skipped(faults, int(skipped), context.n_seqs, context)
        means = {
            f"eval/{name}/mean": by_name[2 * place] / by_name[2 * place + 1]
            for place, name in enumerate(names)
            if by_name[2 * place + 1]
        }
        metrics = {**means, "eval/mean_length": tokens / n, "eval/clipped_ratio": clipped / n}
        if self._config.on_reward_error == "skip":
            metrics["eval/skipped_samples"] = skipped
        return {"eval/reward": total / n, **metrics} if means else metrics

    def _answered(self, engine: Engine, context: CallContext) -> Iterator[SampleBatch]:
        """On a head: its share of the answers, batch by batch. Other ranks take part, but yield nothing."""
        sampling = sampling_params(self._config.sampling, self._tokenizer)
        for rows in _batches(engine, self._rows, self._config, context.n_seqs, self._config.batch_size):
            answered = draw(engine, rows, context, sampling, purpose=PURPOSE).batch
            if answered is not None and len(answered):
                columns = {"columns": rows["columns"]}
                yield SampleBatch(answered.ids, {**answered.data, **columns})


def completion_loss(engine: Engine, rows: TokenFile, config: RunConfig, batch_size: int) -> float:
    """The mean negative log-likelihood, in nats per token, of the completions of all rows, as of supervised
    fine-tuning. Collective over the engine's placement.

    rows        with the keys `input_ids` and `response_mask`
    batch_size  rows that all ranks together compute at once, in one micro-batch for each stage
    """

    def output(logits: Tensor, micro: MicroBatch) -> Tensor:
        return engine.logprobs(logits, micro)

    sums = torch.zeros(2, dtype=torch.float64, device=engine.device)
    for batch in _batches(engine, rows, config, len(rows), batch_size):
        logprobs = engine.inference(batch, output, engine.placement.strategy.pp, counted="response_mask")
        if engine.is_head and logprobs is not None and len(batch):
            learned = batch["response_mask"].values
            sums[0] -= logprobs.values[learned].double().sum()
            sums[1] += learned.sum()
    loss, tokens = engine.sum_over_dp(sums).tolist()
    return loss / tokens


def _batches(
    engine: Engine, rows: TokenFile, config: RunConfig, count: int, at_once: int
) -> Iterator[SampleBatch]:
    """This replica's shares of the samples 0 .. count - 1, on all its ranks: one share of each `at_once` samples."""
    side, rank = DataSide(placement=engine.placement), engine.groups.rank
    for first in range(0, count, at_once):
        ids = range(first, min(first + at_once, count))
        mine = None
        if engine.is_head:
            share = shares(side, ids)[rank]
            fetched = fetch(rows, config, share or (0,)).to(engine.device)
            mine = fetched if share else fetched.take(())  # no samples, with the same keys
        yield share_batch(mine, engine.placement, engine.groups)
