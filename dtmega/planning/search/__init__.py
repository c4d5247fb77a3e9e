"""Search for the fastest layout that fits into memory, for a given number of ranks.

found = search(cfg, {"mesh.tp"}, 384, fabric.load("a100-ib"), 80 * 2**30, 2 * 2**30)
print(text(found))
Path("best.toml").write_text(best_toml(cfg, found), encoding="utf-8")

layout.py       one layout
layouts.py      all layouts, and training's reasons for refusing some of them
estimate.py     closed-form estimates of each layout's memory and time, from places.py, memory.py and duration.py
shortlist.py    the fastest layouts among those that may fit
planners.py     plans of the shortlisted layouts, several at once
ranking.py      the search itself
table.py        the result of a search as plain text, as JSON, and as a configuration
"""

from dtmega.planning.search.layout import KEYS as KEYS
from dtmega.planning.search.ranking import Found as Found
from dtmega.planning.search.ranking import Progress as Progress
from dtmega.planning.search.ranking import Result as Result
from dtmega.planning.search.ranking import search as search
from dtmega.planning.search.table import as_dict as as_dict
from dtmega.planning.search.table import best_toml as best_toml
from dtmega.planning.search.table import text as text
