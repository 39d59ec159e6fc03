"""Examples: configurations to start from, and the data that one of them takes.

What tests need is in tests/.
"""
