"""Reports: learning curves and tables from the folders of runs.

``python -m minerva_torchrl.report runs/ --out report/`` writes one; in Python it is
``make_report(load_runs("runs"), "report")``.
"""

from minerva_torchrl.report.estimates import (
    area_under_curve,
    bootstrap_interval,
    iqm,
    mean_curve,
    value_at,
)
from minerva_torchrl.report.groups import Group, group_runs
from minerva_torchrl.report.make import make_report
from minerva_torchrl.report.reading import LoadedRuns, Problem, RecordedRun, load_runs
from minerva_torchrl.report.references import (
    Reference,
    References,
    ReferencesError,
    load_references,
)

__all__ = [
    "Group",
    "LoadedRuns",
    "Problem",
    "RecordedRun",
    "Reference",
    "References",
    "ReferencesError",
    "area_under_curve",
    "bootstrap_interval",
    "group_runs",
    "iqm",
    "load_references",
    "load_runs",
    "make_report",
    "mean_curve",
    "value_at",
]
