"""The table of reports, and a first user for the admin: admin, with the password admin."""

from django.conf import settings
from django.contrib.auth.hashers import make_password
from django.db import migrations, models


def add_user(apps, editor):
    """Add the user. A real site runs ``manage.py createsuperuser`` instead."""
    users = apps.get_model("auth", "User").objects
    users.create(
        username="admin", password=make_password("admin"), is_staff=True, is_superuser=True
    )


class Migration(migrations.Migration):
    initial = True
    dependencies = [  # noqa: RUF012
        migrations.swappable_dependency(settings.AUTH_USER_MODEL),
        ("auth", "0012_alter_user_first_name_max_length"),
    ]
    operations = [  # noqa: RUF012
        migrations.CreateModel(
            name="Report",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("title", models.CharField(max_length=80)),
                ("rows", models.PositiveIntegerField(default=50)),
                ("job", models.CharField(default="", max_length=64)),
                ("text", models.TextField(default="")),
                ("asked", models.DateTimeField(auto_now_add=True)),
            ],
        ),
        migrations.RunPython(add_user, migrations.RunPython.noop),
    ]
