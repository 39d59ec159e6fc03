"""What the operating system does for us: durable files, parsers of foreign text, child processes, failpoints, memory.

Nothing here knows of models, plans or runs.
"""
