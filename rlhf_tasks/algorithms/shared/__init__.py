"""What several algorithms share: a policy's loss and steps (`policy`), returns, groups, answers in pairs
(`preference`), the order of steps (`schedule`); the calls of a rollout (`generation`,
`segments`), scores, graphs.

Code that only one algorithm needs is in that algorithm's folder.
"""
