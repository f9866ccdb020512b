"""The report: one HTML file that opens from disk, with curves, tables, pictures and an explorer of neighbours."""

from patchmix.report.page.compose import Facts, report

__all__ = ["Facts", "report"]
