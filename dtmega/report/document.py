"""An HTML file that contains everything it needs and loads no other files.

The file's content security policy allows only two scripts, plotly and `page.js`, identified by their digests.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from dtmega.report.markup import json_in_html, text

HERE = Path(__file__).parent
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data: blob:; script-src {scripts}; "
    "base-uri 'none'; form-action 'none'"
)
NO_SCRIPT = "<noscript><section>The figures need JavaScript, which is in this file.</section></noscript>"


def html(title: str, sections: Sequence[str], figures: Mapping[str, str], plotly: str) -> str:
    """The content of the whole HTML file.

    Args:
        title: title of the window.
        sections: content of the page, as HTML.
        figures: id of an HTML element -> JSON of the plotly figure to draw there.
        plotly: plotly's JavaScript.
    """
    scripts = [plotly, (HERE / "page.js").read_text(encoding="utf-8")]
    allowed = []
    for script in scripts:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        allowed.append(f"'sha256-{digest}'")
    policy = POLICY.format(scripts=" ".join(allowed))
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{text(policy)}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{text(title)}</title>",
        f"<style>\n{(HERE / 'page.css').read_text(encoding='utf-8')}</style>",
        "</head><body><main>",
        *sections,
    ]
    for place, figure in figures.items():
        parts.append(f'<script type="application/json" data-place="{place}">{json_in_html(figure)}</script>')
    for script in scripts:
        parts.append(f"<script>{script}</script>")
    return "\n".join([*parts, "</main></body></html>"]) + "\n"
