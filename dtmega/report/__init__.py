"""The report about a run, as one HTML page.

`record.py` reads metrics.jsonl, `run.py` reads the whole run directory, and `page.py` writes the HTML. `curves.py`
computes the curves. `plots.py` and `phase_plot.py` draw them with plotly for the page, and `png.py` draws them with
matplotlib for `--png`. Both libraries are optional, and only these modules and `write.py` import them.
"""
