"""Flow `rollout`."""

from flows.run.algorithm_flow import flow_of

rollout = flow_of("rollout")
