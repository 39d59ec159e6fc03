"""Flow `reward-model`."""

from flows.run.algorithm_flow import flow_of

reward_model = flow_of("reward_model")
