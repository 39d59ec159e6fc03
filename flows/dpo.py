"""Flow `dpo`."""

from flows.run.algorithm_flow import flow_of

dpo = flow_of("dpo")
