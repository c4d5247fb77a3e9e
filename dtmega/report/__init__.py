"""The report about a run, or about a plan, as one HTML page.

`record.py` reads metrics.jsonl, `run.py` reads the whole run directory, and `page.py` writes the HTML. `plan_page/`
writes the page about a plan. `document.py` makes a file of either page. `curves.py` computes the curves. `plots.py` and
`phase_plot.py` draw the page's figures with plotly, `loads/` has the heat map of a mixture's experts, and `png.py`
draws the picture for `--png` with matplotlib. The two libraries are optional, and only the drawing modules and
`write.py` import them.
"""
