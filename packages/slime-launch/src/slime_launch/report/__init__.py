"""A run's report: figures and a chart for the terminal, ``report.json``, and a page for the browser."""

from slime_launch.report.summary import (
    Report,
    draw_chart,
    make_report,
    report_if_finished,
    report_lines,
    scoring_problem,
    write_report,
)

__all__ = [
    "Report",
    "draw_chart",
    "make_report",
    "report_if_finished",
    "report_lines",
    "scoring_problem",
    "write_report",
]
