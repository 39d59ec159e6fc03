"""Process groups and point-to-point messages.

parallel/layout decides which messages are sent.
"""
