"""Rewards in the forms that OpenRLHF documents."""


def as_list(queries, prompts, labels):
    return [
        float(label in query[len(prompt) :])
        for query, prompt, label in zip(queries, prompts, labels, strict=True)
    ]


def reward_func(queries, prompts, labels, **kwargs):
    import torch

    values = torch.tensor(
        [float(query.startswith(prompt)) for query, prompt in zip(queries, prompts, strict=True)]
    )
    return {"rewards": values, "scores": values.clamp(0, 1), "extra_logs": {"mean": values}}


def as_tensor(queries, prompts, labels, **kwargs):
    import torch

    return torch.tensor([float(len(query) > 0) for query in queries])


def scores_only(queries, prompts, labels):
    return {"scores": [0.25 for _ in queries]}
