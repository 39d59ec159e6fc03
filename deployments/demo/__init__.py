"""The demo's configurations and its reward."""
