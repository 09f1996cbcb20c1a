"""The pages of the project that the tests use."""

from django.contrib import admin
from django.urls import path

import tidemill.django.dashboard

urlpatterns = [path("admin/", admin.site.urls), path("tidemill/", tidemill.django.dashboard.urls)]
