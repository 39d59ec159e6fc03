"""Flow `grpo`."""

from flows.run.algorithm_flow import flow_of

grpo = flow_of("grpo")
