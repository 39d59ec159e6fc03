"""A priced plan for people: text, JSON, timeline, and why not otherwise.

Pictures in the UI are in flows/view.
"""
