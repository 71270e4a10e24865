"""Draw timelines: in the terminal, as a figure, as a page to explore, as a trace for Perfetto.

Timeline ──┬── gantt, plain   text.py    letters and colours
           ├── svg            svg.py     a figure as in the papers
           ├── page           html.py    zoom, hover, memory, critical path; predicted above measured
           ├── trace          trace.py   Perfetto, chrome://tracing
           └── report         report.py  the report of a run; the page of a search for a plan
                              chart.py   curves, and plans by memory and time
                              palette.py colours, the facts of a header, elements of figures
                              numbers.py times and sizes with their units
"""

from penstock.view.chart import Series, chart
from penstock.view.html import page
from penstock.view.report import report_page, time_rows_of
from penstock.view.svg import svg
from penstock.view.text import gantt, plain
from penstock.view.trace import trace

__all__ = [
    "Series",
    "chart",
    "gantt",
    "page",
    "plain",
    "report_page",
    "svg",
    "time_rows_of",
    "trace",
]
