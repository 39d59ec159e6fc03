"""Experiment trackers that a run reports to (`report_to`): TensorBoard, Weights & Biases, MLflow.

Each has a process of its own, which reads the committed rows of `metrics.jsonl`. A run does not depend on this code:
any of it may fail or be late. What Prefect shows is in flows/view.
"""
