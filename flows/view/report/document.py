"""A page that needs nothing but itself: its style and its script, which its content security policy names by hash.

Nothing else may load or run: a text of a model or a file that became markup by mistake could do nothing.
"""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from prefect_rlhf.flows.view.pictures.colours import STYLE
from prefect_rlhf.flows.view.pictures.svg import element, short, shown_text

PAGE_STYLE = (
    STYLE
    + """
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:15px/1.5 system-ui,-apple-system,'Segoe UI',Roboto,
'Noto Sans','DejaVu Sans',sans-serif}
main{max-width:920px;margin:0 auto;padding:0 20px 60px}
header{padding:28px 0 8px}
h1{font-size:26px;line-height:1.2;margin:0;overflow-wrap:anywhere}
h2{font-size:19px;margin:40px 0 10px;padding-top:10px;border-top:1px solid var(--rule)}
h3{font-size:15px;margin:22px 0 8px}
p{margin:8px 0}
.pale-text{color:var(--pale)}
nav{position:sticky;top:0;background:var(--page);border-bottom:1px solid var(--rule);padding:8px 0;z-index:2;
display:flex;gap:4px 16px;flex-wrap:wrap;font-size:14px}
a{color:var(--s0);text-decoration:none}
a:hover{text-decoration:underline}
.tiles{display:grid;grid-template-columns:repeat(auto-fill,minmax(200px,1fr));gap:10px;margin:18px 0}
.tile{background:var(--lane);border-radius:8px;padding:10px 14px}
.tile b{display:block;font-size:20px;font-weight:600;overflow-wrap:anywhere}
.tile span{color:var(--pale);font-size:13px}
.panels{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,380px),1fr));gap:14px 20px}
.picture{display:block;width:100%;height:auto}
.wide{overflow-x:auto}
.wide>.picture{min-width:700px}
.rows{overflow-x:auto}
table{border-collapse:collapse;font-size:14px;width:100%}
th,td{text-align:left;padding:5px 14px 5px 0;border-bottom:1px solid var(--rule);vertical-align:top;
overflow-wrap:anywhere}
th{font-weight:600;color:var(--pale);font-size:13px;white-space:nowrap}
td.n,th.n{text-align:right;white-space:nowrap;font-variant-numeric:tabular-nums}
.pairs{display:grid;grid-template-columns:1fr 1fr;gap:12px 20px}
@media (min-width:641px){.of-3{grid-template-columns:repeat(3,1fr)}.of-4{grid-template-columns:repeat(4,1fr)}}
@media (max-width:640px){.pairs{grid-template-columns:1fr}}
.sample{background:var(--lane);border-radius:8px;padding:10px 14px;font-size:14px;min-width:0}
.sample pre{margin:4px 0 8px}
pre{white-space:pre-wrap;overflow-wrap:anywhere;font:13px/1.45 ui-monospace,'DejaVu Sans Mono',monospace;margin:0}
.asked{color:var(--pale)}
details{margin:12px 0}
summary{cursor:pointer;color:var(--s0)}
.code{background:var(--lane);border-radius:8px;padding:12px 14px;margin-top:8px}
.key{display:inline-block;width:12px;height:12px;border-radius:3px;margin-right:6px;vertical-align:-1px}
.runs{display:flex;flex-wrap:wrap;gap:6px 20px;margin:12px 0}
#tip{position:fixed;display:none;background:var(--ink);color:var(--page);font-size:12px;line-height:1.4;
padding:4px 8px;border-radius:5px;pointer-events:none;white-space:pre;z-index:3}
footer{margin-top:48px;color:var(--pale);font-size:13px;border-top:1px solid var(--rule);padding-top:12px}
@media print{nav{position:static}}
"""
    + "".join(
        f".key.f{number}{{background:var(--s{number})}}.off{number} .r{number}{{display:none}}"
        for number in range(8)
    )
)

SCRIPT = """
const tip = document.getElementById('tip');
for (const picture of document.querySelectorAll('svg[data-points]')) {
  const [left, right, first, last] = picture.dataset.scale.split(',').map(Number);
  const names = picture.dataset.names.split('|'), colours = picture.dataset.runs.split('|');
  const runs = picture.dataset.points.split('|').map(run => run.split(';').map(one => one.split(',')));
  picture.addEventListener('pointermove', event => {
    const box = picture.getBoundingClientRect();
    const x = (event.clientX - box.left) * picture.viewBox.baseVal.width / box.width;
    const at = first + (last - first) * Math.min(Math.max((x - left) / (right - left), 0), 1);
    const lines = runs.flatMap((run, number) => {
      if (document.body.classList.contains('off' + colours[number])) return [];
      const nearest = run.reduce((a, b) => Math.abs(b[0] - at) < Math.abs(a[0] - at) ? b : a);
      return [`${names[number]}: ${nearest[1]} at ${nearest[0]}`];
    });
    tip.textContent = lines.join('\\n');
    tip.style.display = 'block';
    tip.style.left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8) + 'px';
    tip.style.top = Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8) + 'px';
  });
  picture.addEventListener('pointerleave', () => { tip.style.display = 'none'; });
}
for (const box of document.querySelectorAll('input[data-run]'))
  box.addEventListener('change', () => document.body.classList.toggle('off' + box.dataset.run, !box.checked));
"""


def document(title: str, body: str) -> str:
    """A whole page."""
    policy = (
        f"default-src 'none'; style-src {_hash(PAGE_STYLE)}; script-src {_hash(SCRIPT)}; base-uri 'none'; "
        "form-action 'none'"
    )
    head = "".join(
        [
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width,initial-scale=1">',
            '<meta name="referrer" content="no-referrer">',
            element("title", shown_text(title)),
            f"<style>{PAGE_STYLE}</style>",
        ]
    )
    script = f"<script>{SCRIPT}</script>"
    inside = f'<main>{body}</main><div id="tip"></div>{script}'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>{inside}</body></html>\n'


def _hash(content: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


def section(anchor: str, heading: str, *parts: str) -> str:
    """A section; empty without any part."""
    inside = "".join(parts)
    if not inside:
        return ""
    return element("section", element("h2", shown_text(heading)), inside, id=anchor)


def paragraph(words: str, **attributes: Any) -> str:
    """A paragraph of plain text."""
    return element("p", shown_text(words), **attributes)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A table of rows with equal columns; columns of numbers are right-aligned."""
    if not rows:
        return ""
    heads = list(rows[0])
    numeric = {head: all(isinstance(row[head], int | float | None) for row in rows) for head in heads}
    side = {head: "n" if numeric[head] else None for head in heads}
    top = element("tr", *(element("th", shown_text(head), class_=side[head], scope="col") for head in heads))
    lines = [
        element("tr", *(element("td", _cell(row[head]), class_=side[head]) for head in heads)) for row in rows
    ]
    return element("div", element("table", element("thead", top), element("tbody", *lines)), class_="rows")


def _cell(value: Any) -> str:
    match value:
        case None:
            return "–"
        case bool():
            return "yes" if value else "no"
        case float():
            return short(value)
        case _:
            return shown_text(str(value))


def header(heading: str, words: str, parts: Sequence[tuple[str, str, str]]) -> str:
    """The head of a page, with a link to each of its sections: (anchor, heading, ...)."""
    links = [element("a", shown_text(name), href=f"#{anchor}") for anchor, name, _ in parts]
    below = paragraph(words, class_="pale-text")
    return element("header", element("h1", shown_text(heading)), below) + element("nav", *links)


def tiles(figures: Sequence[tuple[str, str]]) -> str:
    """Figures with what they are below them."""
    made = [
        element("div", element("b", shown_text(figure)), element("span", shown_text(what)), class_="tile")
        for what, figure in figures
    ]
    return element("div", *made, class_="tiles") if made else ""


def folded(summary: str, *parts: str) -> str:
    """What a reader opens if he wants it."""
    inside = "".join(parts)
    return element("details", element("summary", shown_text(summary)), inside) if inside else ""
