"""The one import name of prefect-rlhf: `prefect_rlhf.flows`, `.planner`, `.rlhf_tasks`, `.blocks`, `.deployments`.

In a checkout they are links to the top-level folders; a wheel has the folders themselves. So a project of yours may
have a `flows` folder of its own (docs/adr/0027).
"""
