"""The page about a plan, as one HTML file.

`write.py` writes the file, and `page.py` writes its sections. `owners.py` divides the memory into classes, `memory.py`
draws the classes with plotly, `wire.py` adds up the messages, and `duration.py` shows the parts and the schedule of a
step.
"""

from dtmega.report.plan_page.write import write_plan_page

__all__ = ["write_plan_page"]
