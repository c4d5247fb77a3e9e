"""A run as one page: `record.py` reads its metrics.jsonl, `run.py` all of its directory, and `page.py` writes the HTML.

The figures are drawn from the curves of `curves.py`: by plotly for the page (`plots.py`), by matplotlib for `--png`
(`png.py`). Both libraries are optional, and only these two modules import them.
"""
