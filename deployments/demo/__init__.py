"""The demo's configurations and its reward.

Its data and stages, which its flow runs, are in flows/demo.
"""
