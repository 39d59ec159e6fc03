"""What a series (flows/series.py) needs between two runs: its new rows, its champion, comparison and approval.

`champions` and `new_rows` know the folder of a series; `comparison` decides by scores, `approval` asks a person;
`beginning` checks a run before it starts.
"""
