"""The report about a run, as one HTML page.

`record.py` reads metrics.jsonl, `run.py` reads the whole run directory, and `page.py` writes the HTML. `curves.py`
computes the curves, which `plots.py` and `phase_plot.py` draw with plotly for the page, and `png.py` with matplotlib
for `--png`. plotly and matplotlib are optional; only the modules that draw, and `write.py`, import the two libraries.
"""
