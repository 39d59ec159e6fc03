"""Prints the fields of TRL's configurations with their defaults, as JSON. It imports nothing of ours:
`bench.trl_names` runs this file in an environment that has TRL.

    python trl_fields.py

{"version": ..., "fields": {our algorithm: {field: default}}}; a default that JSON does not know is written as text.
"""

import dataclasses
import importlib
import json

CONFIGURATIONS = {
    "ppo": ("trl.experimental.ppo", "PPOConfig"),
    "grpo": ("trl", "GRPOConfig"),
    "rloo": ("trl", "RLOOConfig"),
    "dpo": ("trl", "DPOConfig"),
    "kto": ("trl", "KTOConfig"),
    "sft": ("trl", "SFTConfig"),
    "reward_model": ("trl", "RewardConfig"),
    "distillation": ("trl.experimental.gkd", "GKDConfig"),
    "lora": ("trl", "ModelConfig"),
}


def default(field):
    if field.default is not dataclasses.MISSING:
        return field.default
    return None if field.default_factory is dataclasses.MISSING else field.default_factory()


def main():
    found = {}
    for algorithm, (module, name) in CONFIGURATIONS.items():
        try:
            configuration = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):  # a release has it no more, or not yet
            continue
        its = {field.name: default(field) for field in dataclasses.fields(configuration)}
        found[algorithm] = dict(sorted(its.items()))
    print(json.dumps({"version": importlib.import_module("trl").__version__, "fields": found}, default=str))


if __name__ == "__main__":
    main()
