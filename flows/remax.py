"""Flow `remax`."""

from flows.run.algorithm_flow import flow_of

remax = flow_of("remax")
