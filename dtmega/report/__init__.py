"""A run as one page: `record.py` reads its metrics.jsonl, `run.py` all of its directory; `page.py` writes the HTML.

The numbers of the figures (`curves.py`) are drawn twice: by plotly for the page, by matplotlib for `--png`. Both are
optional, and imported by nothing but `plots.py` and `png.py`.
"""
