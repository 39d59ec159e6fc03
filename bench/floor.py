"""A bare loop in one process with the arithmetic of an iteration: what a run's time is compared with.

    python -m bench.floor WORK.json OUT.json      (as `bench.vs_trl` calls it)

transformers' models, its attention, torch's fused AdamW, a KV cache that is allocated once. No padding is needed,
because all sequences have one length. The head computes only the rows that count.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
    StaticCache,
)

from bench.vs_trl import PROMPT
from prefect_rlhf.flows.demo import byte_tokenizer

Work = dict[str, Any]
Marks = list[float]
Iteration = Callable[[Tensor], Marks]
PAIRS = ("dpo", "reward_model")


class OneTypeCache(StaticCache):
    """Under autocast rotated keys are float32 and values bfloat16; a static cache wants one type."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return super().update(key_states.to(value_states.dtype), value_states, *args, **kwargs)


class Trained:
    """A model and its optimizer."""

    def __init__(self, model: PreTrainedModel, work: Work) -> None:
        self.model = model
        self._optimizer = torch.optim.AdamW(
            model.parameters(), lr=work["learning_rate"], betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )

    def step(self, loss: Tensor) -> None:
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()


def generate(model: PreTrainedModel, prompts: Tensor, new_tokens: int) -> tuple[Tensor, Tensor]:
    """prompts [n, P] -> (sequences [n, P + new_tokens], log-probabilities of the new tokens [n, new_tokens])."""
    length = prompts.shape[1]
    cache = OneTypeCache(config=model.config, max_cache_len=length + new_tokens)
    tokens, step, drawn = prompts, prompts, []
    with torch.inference_mode():
        for position in range(length, length + new_tokens):
            place = torch.arange(position - step.shape[1], position)
            logits = model(
                step, past_key_values=cache, cache_position=place, position_ids=place[None], logits_to_keep=1
            ).logits[:, -1]
            log_p = logits.float().log_softmax(-1)
            step = torch.multinomial(log_p.exp(), 1)
            drawn.append(log_p.gather(1, step))
            tokens = torch.cat([tokens, step], 1)
    return tokens.clone(), torch.cat(drawn, 1)  # outside inference mode, so that autograd takes them


def logprobs(model: PreTrainedModel, tokens: Tensor, prompt: int) -> tuple[Tensor, Tensor]:
    """(log-probabilities [n, R] of the tokens after the prompt, entropy [n, R])."""
    hidden = model.model(tokens, use_cache=False).last_hidden_state[:, prompt - 1 : -1]
    log_p = model.lm_head(hidden).float().log_softmax(-1)
    with torch.no_grad():
        entropy = -(log_p.exp() * log_p).sum(-1)
    return log_p.gather(-1, tokens[:, prompt:, None]).squeeze(-1), entropy


def values(model: PreTrainedModel, tokens: Tensor, prompt: int) -> Tensor:
    """[n, R + 1]: the scalar head from the token before the first new one on."""
    hidden = model.model(tokens, use_cache=False).last_hidden_state[:, prompt - 1 :]
    score: Any = model.score
    return score(hidden).squeeze(-1).float()


def scalar(work: Work) -> PreTrainedModel:
    return AutoModelForSequenceClassification.from_pretrained(f"{work['folder']}/reward", num_labels=1)


def causal(work: Work) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(f"{work['folder']}/actor")


def clipped(ratio: Tensor, advantages: Tensor) -> Tensor:
    return torch.max(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2)).mean()


def ppo(work: Work, prompt: int) -> Iteration:
    """Four mini-batches."""
    actor, critic = Trained(causal(work), work), Trained(scalar(work), work)
    reference, reward = causal(work).requires_grad_(False), scalar(work).requires_grad_(False)

    def iteration(batch: Tensor) -> Marks:
        tokens, old = generate(actor.model, batch, work["new_tokens"])
        generated = time.perf_counter()
        with torch.no_grad():
            rewards = -0.05 * (old - logprobs(reference, tokens, prompt)[0])
            rewards[:, -1] += values(reward, tokens, prompt)[:, -1]
            value = values(critic.model, tokens, prompt)[:, :-1]
            advantages = gae(rewards, value)
            returns = advantages + value
            advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        scored = time.perf_counter()
        for rows in torch.randperm(len(tokens)).chunk(4):
            new, _ = logprobs(actor.model, tokens[rows], prompt)
            actor.step(clipped((new - old[rows]).exp(), advantages[rows]))
            now = values(critic.model, tokens[rows], prompt)[:, :-1]
            near = value[rows] + (now - value[rows]).clamp(-0.2, 0.2)
            errors = torch.max((now - returns[rows]).square(), (near - returns[rows]).square())
            critic.step(0.5 * errors.mean())
        return [generated, scored]

    return iteration


def gae(rewards: Tensor, value: Tensor, lam: float = 0.95) -> Tensor:
    """Generalised advantage estimation with gamma 1; all [n, R]."""
    following = torch.cat([value[:, 1:], torch.zeros_like(value[:, :1])], 1)
    advantages, running = torch.empty_like(rewards), torch.zeros_like(rewards[:, 0])
    for t in reversed(range(rewards.shape[1])):
        running = rewards[:, t] + following[:, t] - value[:, t] + lam * running
        advantages[:, t] = running
    return advantages


def grouped(work: Work, prompt: int) -> Iteration:
    """GRPO, with k3 in the loss, or RLOO, with the KL divergence in the reward and a ratio of whole responses: one
    optimizer step on groups of samples of a prompt."""
    group, is_grpo = work["group"], work["algorithm"] == "grpo"
    actor, reference = Trained(causal(work), work), causal(work).requires_grad_(False)

    def iteration(batch: Tensor) -> Marks:
        batch = batch[: len(batch) // group].repeat_interleave(group, 0)
        tokens, old = generate(actor.model, batch, work["new_tokens"])
        generated = time.perf_counter()
        with torch.no_grad():
            theirs, _ = logprobs(reference, tokens, prompt)
        scores = (tokens[:, prompt:] % 2).float().mean(1).view(-1, group)
        if is_grpo:
            advantages = (scores - scores.mean(1, True)) / (scores.std(1, keepdim=True) + 1e-4)
        else:
            rewards = scores - 0.05 * (old - theirs).sum(1).view(-1, group)
            advantages = rewards - (rewards.sum(1, True) - rewards) / (group - 1)
        advantages = advantages.view(-1, 1)
        scored = time.perf_counter()
        new, _ = logprobs(actor.model, tokens, prompt)
        if is_grpo:
            away = theirs - new
            loss = clipped((new - old).exp(), advantages) + 0.05 * (away.exp() - away - 1).mean()
        else:
            loss = clipped((new - old).sum(1, True).exp(), advantages)
        actor.step(loss)
        return [generated, scored]

    return iteration


def dpo(work: Work, _: int) -> Iteration:
    """One optimizer step on pairs: both answers of each in one batch."""
    actor, reference = Trained(causal(work), work), causal(work).requires_grad_(False)

    def answers(model: PreTrainedModel, batch: Tensor) -> Tensor:
        """[pairs, 2] log-probabilities of the answers."""
        return logprobs(model, batch.flatten(0, 1), PROMPT)[0].sum(1).view(-1, 2)

    def iteration(batch: Tensor) -> Marks:
        with torch.no_grad():
            theirs = answers(reference, batch)
        gained = answers(actor.model, batch) - theirs
        actor.step(-F.logsigmoid(0.1 * (gained[:, 0] - gained[:, 1])).mean())
        return []

    return iteration


def reward_model(work: Work, length: int) -> Iteration:
    """One optimizer step on pairs."""
    model = Trained(scalar(work), work)

    def iteration(batch: Tensor) -> Marks:
        scores = values(model.model, batch.flatten(0, 1), length)[:, -1].view(-1, 2)
        model.step(-F.logsigmoid(scores[:, 0] - scores[:, 1]).mean())
        return []

    return iteration


def sft(work: Work, _: int) -> Iteration:
    """One optimizer step."""
    actor = Trained(causal(work), work)

    def iteration(batch: Tensor) -> Marks:
        logits = actor.model(batch, use_cache=False).logits[:, :-1].float()
        actor.step(F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()))
        return []

    return iteration


WORKS = {"ppo": ppo, "grpo": grouped, "rloo": grouped, "dpo": dpo, "sft": sft, "reward_model": reward_model}
"""Algorithm -> what makes its iteration of a work and the length of its rows. An iteration takes rows of tokens, and
gives the times at which generation and scoring ended, where it has them."""


def tokens_of(work: Work) -> Tensor:
    """All rows as token ids of one length: [rows, tokens], of pairs [rows, 2, tokens]."""
    name = work["algorithm"]
    encode = byte_tokenizer().encode
    lines = Path(work["folder"], f"{name}.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    if name in PAIRS:
        both = ("chosen", "rejected")
        return torch.tensor([[[*encode(row["prompt"] + row[key]).ids, 2] for key in both] for row in rows])
    end = [2] if name == "sft" else []
    return torch.tensor([encode(row["prompt"] + row.get("completion", "")).ids + end for row in rows])


def iterations(work: Work) -> Iterator[dict[str, float]]:
    """Each iteration's seconds: whole, generation, scoring, training where it has them, and CPU."""
    torch.manual_seed(1234)
    rows = tokens_of(work)
    iteration = WORKS[work["algorithm"]](work, rows.shape[-1])
    for batch in rows.split(work["batch_size"])[: work["iterations"]]:
        started, cpu = time.perf_counter(), time.process_time()
        with torch.autocast("cpu", torch.bfloat16, enabled=work["dtype"] == "bfloat16"):
            marks = [started, *iteration(batch), time.perf_counter()]
        row = {"iteration": marks[-1] - started, "cpu": time.process_time() - cpu}
        if len(marks) == 4:
            for place, part in enumerate(("generation", "scoring", "training")):
                row[part] = marks[place + 1] - marks[place]
        yield row


def main() -> None:
    work, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    out.write_text(json.dumps(list(iterations(work))))


if __name__ == "__main__":
    main()
