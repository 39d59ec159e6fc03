"""Flow `expert-iteration`."""

from flows.run.algorithm_flow import flow_of

expert_iteration = flow_of("expert_iteration")
