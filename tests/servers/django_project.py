"""The settings of a Django project whose databases tests name: in this process and its children."""

from __future__ import annotations

import json
import os

SECRET_KEY = "tests"
USE_TZ = True
INSTALLED_APPS = ["tidemill.django"]
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
DATABASES = json.loads(os.environ.get("TIDEMILL_TEST_DATABASES", "{}"))

ENGINES = [database["ENGINE"] for database in DATABASES.values()]
if os.environ.get("TIDEMILL_TEST_MARIADB") or any(name.endswith("mysql") for name in ENGINES):
    try:
        import MySQLdb  # noqa: F401
    except ImportError:
        import pymysql

        pymysql.version_info = (2, 2, 1, "final", 0)  # Django 6 asks for such a mysqlclient
        pymysql.install_as_MySQLdb()
