"""Process groups, point-to-point messages, and copies between host memory and the device.

parallel/layout decides which messages are sent.
"""
