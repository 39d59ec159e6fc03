"""Flow `distillation`."""

from flows.run.algorithm_flow import flow_of

distillation = flow_of("distillation")
