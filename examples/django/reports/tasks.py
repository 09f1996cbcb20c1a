"""The tasks. A worker finds them since this module is called tasks."""

import datetime as dt
import time

from django.utils import timezone

from reports.models import Report
from tidemill import this_job
from tidemill.django import mill


@mill.task(timeout=60)
def make_report(pk: int) -> str:
    """Make a report, row by row, and tell how far it is."""
    report = Report.objects.get(pk=pk)
    for row in range(report.rows):
        time.sleep(0.05)  # the work
        this_job().progress(row + 1, report.rows)
    report.text = f"{report.rows} rows are fine"
    report.save(update_fields=["text"])
    return report.text


@mill.task(schedule="*/5 * * * *")
def forget_old_reports() -> int:
    """Delete reports of yesterday: every five minutes."""
    old = Report.objects.filter(asked__lt=timezone.now() - dt.timedelta(days=1))
    return old.delete()[0]
