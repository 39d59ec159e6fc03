"""The colours of pictures, in the light and in the dark, and the style sheet that names them."""

COLOURS = {
    "generate": "#4a3fb5",
    "inference": "#6fb7dc",
    "train_step": "#cc6677",
    "fetch": "#a9adb5",
    "transfer": "#2a8a4c",
    "reallocate": "#aa4499",
    "release": "#d2bf5a",
    "onload": "#44aa99",
    "offload": "#9c3868",
    "save": "#999933",
    "save_samples": "#e98a62",
    "sync": "#5f8fc9",
    "evaluate": "#8a4a2b",
    "waiting": "#dfe2e7",
    "overhead": "#e4572e",
}
"""A colour for each kind of work that may take long; colour-blind-safe (after Tol's muted scheme, 2021). `waiting`:
for another rank; `overhead`: nothing runs although the next node could. Others are grey."""
OTHER = "#c3c7ce"
DARK = {"generate": "#8479ee", "offload": "#c2608f", "evaluate": "#b5714e", "waiting": "#343943"}
"""What is too dark, or too bright, on a dark page."""
SERIES = ("#0b69b3", "#cf5a15", "#1d8f62", "#b0449a", "#8a6d00", "#4a5fd0", "#a33a3a", "#4b7f8c")
SERIES_DARK = ("#5aa9ea", "#f08a4b", "#4cc391", "#de82ca", "#d3b43f", "#93a0f5", "#e27d7d", "#8cc0cd")
"""Of several runs' curves, in their order."""
CALL_KINDS = ("generate", "inference", "train_step")
WORDS = {"train_step": "train", "save_samples": "save samples", "waiting": "waiting for another rank"} | {
    "overhead": "orchestration"
}
"""How a kind is called in a legend, where not by its name."""

_LIGHT_PAGE = {"page": "#ffffff", "ink": "#1d2129", "pale": "#626b79", "rule": "#e2e5ea", "lane": "#f3f4f7"}
_DARK_PAGE = {"page": "#15181e", "ink": "#e7eaf0", "pale": "#98a2b3", "rule": "#2d333d", "lane": "#1e222a"}


def in_words(kind: str) -> str:
    """A kind of node or of time, for a legend."""
    return WORDS.get(kind, kind)


def _ink(colour: str) -> str:
    """Black or white, whichever is more readable on a colour."""
    red, green, blue = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    return "#111111" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.55 else "#ffffff"


def _variables(page: dict[str, str], kinds: dict[str, str], series: tuple[str, ...]) -> str:
    named = dict(page)
    for kind, colour in kinds.items():
        named |= {f"k-{kind}": colour, f"i-{kind}": _ink(colour)}
    named |= {f"s{number}": colour for number, colour in enumerate(series)}
    return "".join(f"--{name}:{colour};" for name, colour in named.items())


def _classes() -> str:
    kinds = [*COLOURS, "other"]
    of_kinds = [
        f".k-{kind}{{fill:var(--k-{kind})}}.k-{kind}+text,.i-{kind}{{fill:var(--i-{kind})}}" for kind in kinds
    ]
    of_series = [
        f".s{number}{{stroke:var(--s{number})}}.f{number}{{fill:var(--s{number})}}"
        for number in range(len(SERIES))
    ]
    return "".join([*of_kinds, *of_series])


_light = _variables(_LIGHT_PAGE, {**COLOURS, "other": OTHER}, SERIES)
_dark = _variables(_DARK_PAGE, {**COLOURS, **DARK, "other": OTHER}, SERIES_DARK)
STYLE = (
    f":root{{color-scheme:light dark;{_light}}}@media (prefers-color-scheme:dark){{:root{{{_dark}}}}}"
    ".picture{font:11px system-ui,-apple-system,'Segoe UI',Roboto,'Noto Sans','DejaVu Sans',sans-serif}"
    ".picture text{fill:var(--ink)}.picture .pale{fill:var(--pale)}.picture .small{font-size:10px}"
    ".picture .head{font-weight:600;font-size:12px}.picture .note{fill:var(--s1)}"
    ".back{fill:var(--page)}.lane{fill:var(--lane)}.rule{stroke:var(--rule);stroke-width:1;fill:none}"
    ".arrow{stroke:var(--pale);stroke-width:1.1;fill:none}.tip{fill:var(--pale)}"
    ".curve{fill:none;stroke-width:1.8;stroke-linejoin:round}.band{opacity:.18}.odd{opacity:.72}"
    f".planned{{fill:none;stroke:var(--pale);stroke-width:1.4;stroke-dasharray:3 2}}{_classes()}"
)
"""The style sheet of pictures, alone and in a page. `k-KIND` fills with a kind's colour, and a text that follows is
readable on it; `sN` and `fN` draw and fill with the colour of series N."""


def class_of(kind: str) -> str:
    """The class of a bar or box of this kind."""
    return f"k-{kind}" if kind in COLOURS else "k-other"
