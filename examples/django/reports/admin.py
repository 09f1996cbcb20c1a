"""Reports in the admin, beside the jobs of tidemill."""

from django.contrib import admin

from reports.models import Report

admin.site.register(Report)
