"""The report of a run: one HTML page that opens offline and can be sent, and a trace for Perfetto.

`contents.py` says what a report is made of, which flows/run/reporting.py reads from a run folder.
"""
