"""A model for the tests."""

from django.db import models

from tidemill.django import pass_by_key


@pass_by_key
class Order(models.Model):
    """Something that tasks work on, and that may be an argument of a task."""

    note = models.CharField(max_length=100, default="")


class Customer(models.Model):
    """A model whose instances are no arguments."""

    name = models.CharField(max_length=100)
