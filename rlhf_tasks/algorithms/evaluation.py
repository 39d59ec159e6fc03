"""The evaluation in a training run: answers to held-out rows with the weights that the training has just left."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from rlhf_tasks.algorithms.evaluate.config import EvaluateConfig
from rlhf_tasks.algorithms.fetch import fetch
from rlhf_tasks.algorithms.shared.context import CallContext
from rlhf_tasks.algorithms.shared.generation import sampling_params
from rlhf_tasks.algorithms.shared.scoring import score
from rlhf_tasks.data.token_file import TokenFile
from rlhf_tasks.data.tokenizer import Tokenizer
from rlhf_tasks.parallel.batch.samples import SampleBatch
from rlhf_tasks.parallel.generate.generation import generate
from rlhf_tasks.parallel.layout.transfers import shares
from rlhf_tasks.parallel.train.engine import Engine, share_batch
from rlhf_tasks.rewards.process import RewardProcess
from rlhf_tasks.spec import DataSide

PURPOSE = "evaluation"
"""Names the random numbers of sampled answers: training samples draw others."""


class Evaluation:
    """The held-out rows and rewards of a run, on one rank.

    config   what is evaluated, see `rlhf_tasks.algorithms.held_out.evaluation_of`
    rows     the tokenised held-out rows
    rewards  this rank's helper process for the rewards of `config`
    """

    def __init__(
        self, config: EvaluateConfig, rows: TokenFile, rewards: RewardProcess, tokenizer: Tokenizer
    ) -> None:
        self._config, self._rows, self._rewards, self._tokenizer = config, rows, rewards, tokenizer

    def metrics(self, engine: Engine, iteration: int, run_folder: Path) -> dict[str, float]:
        """Answer all held-out rows and score the answers. Collective over the engine's placement.

        Returns, equal on every rank, over all answers: eval/reward, the mean score; eval/<name>/mean of each reward;
        eval/mean_length in tokens; eval/clipped_ratio, the fraction without an end token. An answer depends only on
        the weights, its row and (seed, iteration, number of the answer), not on the layout.
        Raises RewardError as `score` does.
        """
        context = CallContext(
            config=self._config,
            iteration=iteration,
            first_sample=0,
            n_seqs=len(self._rows) * self._config.num_generations,
            micro_batches=1,
            tokenizer=self._tokenizer,
            rewards=self._rewards,
            run_folder=run_folder,
            where=lambda sample: self._rows.where(self._config.row_of(self._rows, sample)),
        )
        names = [function.name for function in self._config.rewards]
        sums = torch.zeros(4 + 2 * len(names), dtype=torch.float64)  # over this head's answers
        for answered in self._answers(engine, context):
            scored = score(engine, answered, context)
            assert scored is not None, "this rank is a head"
            counts = [
                len(answered),
                answered["response_mask"].values.sum(),
                answered["truncated"].values.sum(),
            ]
            judged = [[v for v in scored.rewards[name] if v is not None] for name in names]
            by_name = [figure for values in judged for figure in (sum(values), len(values))]
            sums += torch.tensor([*counts, scored.scores.sum(), *by_name], dtype=torch.float64)
        n, tokens, clipped, total, *by_name = engine.sum_over_dp(sums.to(engine.device)).tolist()
        return {
            "eval/reward": total / n,
            "eval/mean_length": tokens / n,
            "eval/clipped_ratio": clipped / n,
            **{
                f"eval/{name}/mean": by_name[2 * place] / by_name[2 * place + 1]
                for place, name in enumerate(names)
                if by_name[2 * place + 1]
            },
        }

    def _answers(self, engine: Engine, context: CallContext) -> Iterator[SampleBatch]:
        """On a head: its share of the answers, batch by batch, where it has one. Other ranks only take part."""
        side, rank = DataSide(placement=engine.placement), engine.groups.rank
        sampling = sampling_params(self._config, self._tokenizer)
        for first in range(0, context.n_seqs, self._config.batch_size):
            ids = range(first, min(first + self._config.batch_size, context.n_seqs))
            asked = self._asked(shares(side, ids)[rank]) if engine.is_head else None
            asked = share_batch(asked, engine.placement, engine.groups, rank)
            answered = generate(
                engine, asked, sampling, self._config.seed, context.iteration, purpose=PURPOSE
            )
            if answered is not None and len(answered):
                columns = {"columns": asked["columns"]}
                yield SampleBatch(answered.ids, {**answered.data, **columns})

    def _asked(self, ids: Sequence[int]) -> SampleBatch:
        """The rows of some answers. A batch of no answers has the same keys."""
        found = fetch(self._rows, self._config, ids or (0,))
        return found if ids else found.take(())
