"""The report about a run or a plan, as one HTML page.

`record.py` reads metrics.jsonl, `run.py` reads the whole run directory, and `page.py` writes the HTML. `plan_page/`
writes the page about a plan. `document.py` wraps either page in a complete HTML document. `curves.py` computes the
curves. `plots.py` and `phase_plot.py` draw the page's figures with plotly, and `loads/` draws the heat map of the
expert loads. plotly is an optional library; only the drawing modules and `write.py` import it.
"""
