"""How a report looks: on light and on dark pages, on wide and on narrow ones."""

from __future__ import annotations

__all__ = ["COLOURS", "DASHES", "STYLE"]

# For light and for dark pages: at least 4.5 : 1 against the page, and told apart also by those who see few colours.
COLOURS = [
    ("#0b5fa5", "#6db7f2"),
    ("#b93c08", "#fb9a5c"),
    ("#13743a", "#6fd08c"),
    ("#7e3aa8", "#c79af0"),
    ("#8a5a00", "#e0b84c"),
    ("#a81b5e", "#f28cb8"),
    ("#0f6e74", "#5cc9cf"),
    ("#555b66", "#b4bac4"),
]
DASHES = ["", "7 3", "2 3", "9 3 2 3", "12 4", "4 2 1 2 1 2", "1 2"]
"""Seven of them for eight colours: the same pair comes back after 56 lines."""
PHASES = {
    "load": ("#8a5a00", "#e0b84c"),
    "compute": ("#13743a", "#6fd08c"),
    "wait": ("#b93c08", "#fb9a5c"),
    "communicate": ("#0b5fa5", "#6db7f2"),
}

_PAGE = """
:root{color-scheme:light dark;--page:#fff;--text:#1c1f24;--soft:#545a63;--rule:#d4d8de;--bad:#b3180f}
*{box-sizing:border-box}
body{margin:0 auto;padding:1rem;max-width:76rem;background:var(--page);color:var(--text);
 font:16px/1.5 system-ui,sans-serif;overflow-wrap:anywhere}
h1{font-size:1.6rem;line-height:1.2;margin:.5rem 0}h2{font-size:1.2rem;margin:2rem 0 .5rem}
h3{font-size:1rem;margin:1.5rem 0 .25rem}
p{margin:.4rem 0}.soft{color:var(--soft)}
.scroll{overflow-x:auto}.scroll:focus-visible{outline:2px solid var(--c0)}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;min-width:100%}
th,td{padding:.35rem .6rem;border-bottom:1px solid var(--rule);text-align:right;white-space:nowrap}
th:first-child{text-align:left;position:sticky;left:0;background:var(--page);white-space:normal;
 min-width:10.5rem;max-width:24rem}
tr>*:first-child{padding-left:0}th{font-weight:600}tbody th{font-weight:500}
td.bad{color:var(--bad);text-align:left;white-space:normal}
.grid-of{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,22rem),1fr));gap:.5rem 1.5rem}
figure{margin:.5rem 0;min-width:0;max-width:40rem}figcaption{font-weight:600;font-size:.95rem}
svg{display:block;width:100%;max-width:100%;height:auto}
svg.sample{display:inline-block;width:30px;height:8px;margin-right:.4rem}
text{font:12.5px system-ui,sans-serif;fill:var(--soft)}.name{font-weight:600}
.line{fill:none;stroke-width:2}.faint{stroke-width:1;opacity:.55}
.grid{stroke:var(--rule);fill:none}.lead{stroke:var(--rule);fill:none}.edge{stroke:var(--soft);stroke-width:.7}
.key{display:flex;flex-wrap:wrap;gap:.2rem 1.2rem;padding:0;margin:.3rem 0;list-style:none;font-size:.9rem}
.key svg{display:inline-block;width:14px;height:14px;margin-right:.4rem;vertical-align:-2px}
pre{white-space:pre-wrap;border-left:3px solid var(--bad);margin:.3rem 0;padding:.2rem .8rem;font-size:.85rem}
"""
_DARK = "--page:#14171b;--text:#e8eaed;--soft:#a9b0ba;--rule:#3a4049;--bad:#ff8a80;"


def _colours(dark: bool) -> str:
    return "".join(f"--c{at}:{pair[dark]};" for at, pair in enumerate(COLOURS)) + "".join(
        f"--{phase}:{pair[dark]};" for phase, pair in PHASES.items()
    )


def _classes() -> str:
    lines = "".join(
        f"path.c{at}{{stroke:var(--c{at})}}text.c{at},circle.c{at}{{fill:var(--c{at})}}" for at in range(len(COLOURS))
    )
    return lines + "".join(f"rect.{phase}{{fill:var(--{phase})}}" for phase in PHASES)


_LIGHT_COLOURS, _DARK_COLOURS = f":root{{{_colours(False)}}}", f":root{{{_DARK}{_colours(True)}}}"
STYLE = f"{_PAGE}{_LIGHT_COLOURS}{_classes()}\n@media(prefers-color-scheme:dark){{{_DARK_COLOURS}}}"
"""The style sheet."""
