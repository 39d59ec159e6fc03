"""Flow `rloo`."""

from flows.run.algorithm_flow import flow_of

rloo = flow_of("rloo")
