"""Pages for people: a report, the trend of a run, and a comparison, each one self-contained file. Imports no torch."""

from dflash.pages.document import write_page
from dflash.pages.report_page import report_page

__all__ = ["report_page", "write_page"]
