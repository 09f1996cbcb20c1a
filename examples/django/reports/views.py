"""The page with the form, and the progress that the page asks for."""

from django import forms
from django.db import transaction
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import get_object_or_404, redirect, render

from reports.models import Report
from reports.tasks import make_report
from tidemill import JobNotFound
from tidemill.django import mill
from tidemill.errors import JobPruned


class ReportForm(forms.ModelForm):
    """What a person says about a report."""

    class Meta:
        model = Report
        fields = ("title", "rows")


@transaction.atomic
def index(request: HttpRequest) -> HttpResponse:
    """Show the reports, or ask for one. The job is stored when the transaction commits."""
    form = ReportForm(request.POST or None)
    if request.method == "POST" and form.is_valid():
        report = form.save()
        report.job = make_report.enqueue(report.pk).id
        report.save(update_fields=["job"])
        return redirect("index")
    reports = Report.objects.order_by("-pk")[:20]
    return render(request, "reports/index.html", {"form": form, "reports": reports})


def progress(request: HttpRequest, pk: int) -> JsonResponse:
    """How far a report is: one read of the store."""
    report = get_object_or_404(Report, pk=pk)
    try:
        record = mill.job(report.job).refresh()
    except (JobNotFound, JobPruned):
        return JsonResponse({"state": "gone", "done": 1, "total": 1, "text": report.text})
    done, total = record.progress or (0, report.rows)
    answer = {"state": record.state, "done": done, "total": total}
    return JsonResponse({**answer, "text": report.text or record.latest_error})
