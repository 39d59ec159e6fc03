"""Process groups and point-to-point messages.

Which messages are sent is said by parallel/layout.
"""
