"""Flow `kto`."""

from flows.run.algorithm_flow import flow_of

kto = flow_of("kto")
