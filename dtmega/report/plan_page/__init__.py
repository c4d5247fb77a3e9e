"""The page about a plan, as one HTML file.

`write.py` writes the file, and `page.py` its sections. `owners.py` divides the memory into classes, `memory.py` draws
them with plotly, `wire.py` adds up the messages, and `duration.py` shows the parts of the step and its schedule.
"""

from dtmega.report.plan_page.write import check_page, write_plan_page

__all__ = ["check_page", "write_plan_page"]
