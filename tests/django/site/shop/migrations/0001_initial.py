"""The tables of the tests."""

from typing import ClassVar

from django.db import migrations, models


def key() -> models.Field:
    return models.BigAutoField(
        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
    )


class Migration(migrations.Migration):
    initial = True
    operations: ClassVar = [
        migrations.CreateModel(
            name="Order",
            fields=[("id", key()), ("note", models.CharField(default="", max_length=100))],
        ),
        migrations.CreateModel(
            name="Customer", fields=[("id", key()), ("name", models.CharField(max_length=100))]
        ),
    ]
