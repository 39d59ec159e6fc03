"""Flow `sft`."""

from flows.run.algorithm_flow import flow_of

sft = flow_of("sft")
