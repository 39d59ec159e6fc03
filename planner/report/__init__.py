"""Presentation of a priced plan: text, JSON, timeline, and rejected alternatives.

Pictures in the UI are in flows/view.
"""
