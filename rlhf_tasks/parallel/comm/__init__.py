"""Process groups, point-to-point messages, parameters from one layout to another, and copies between host memory and
the device.

parallel/layout decides which messages are sent.
"""
