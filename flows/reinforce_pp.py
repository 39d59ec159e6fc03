"""Flow `reinforce-pp`."""

from flows.run.algorithm_flow import flow_of

reinforce_pp = flow_of("reinforce_pp")
