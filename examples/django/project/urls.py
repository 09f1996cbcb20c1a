"""The pages of the site."""

from django.contrib import admin
from django.urls import path
from reports import views

import tidemill.django.dashboard

urlpatterns = [
    path("", views.index, name="index"),
    path("reports/<int:pk>/progress", views.progress, name="progress"),
    path("admin/", admin.site.urls),
    path("tidemill/", tidemill.django.dashboard.urls),
]
