"""Pages for people: a report, the trend of a run, and a comparison, each one self-contained file. Imports no torch."""

from dflash.pages.comparison_page import comparison_page
from dflash.pages.document import write_page
from dflash.pages.report_page import report_page
from dflash.pages.trend_page import trend_page

__all__ = ["comparison_page", "report_page", "trend_page", "write_page"]
