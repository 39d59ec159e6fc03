"""Services near the operating system: durable files, safe parsing, child processes, failpoints, memory.

Nothing here knows models, plans or runs.
"""
