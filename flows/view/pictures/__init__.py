"""Pictures of a run as SVG: curves, device timeline, plan, bars of seconds and memory.

The Prefect UI shows them as images, a run's report has them in its page. Both versions of the UI show an image 690 to
890 pixels wide, so a picture is `WIDTH` wide and its small text stays readable.
"""
