"""Settings of the project that the tests use; the environment names the stores."""

import os
from pathlib import Path

import django

BASE_DIR = Path(os.environ.get("SITE_DATA") or Path(__file__).parent.parent)
SECRET_KEY = "not secret"
DEBUG = os.environ.get("SITE_DEBUG") == "1"
ALLOWED_HOSTS = ["*"]
USE_TZ = True
ROOT_URLCONF = "project.urls"
INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "tidemill.django",
    "shop",
]
if django.VERSION < (6, 0):
    INSTALLED_APPS.append("django_tasks")
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ]
        },
    }
]
STATIC_URL = "static/"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": BASE_DIR / "db.sqlite3",
        "CONN_MAX_AGE": int(os.environ.get("SITE_CONN_MAX_AGE", "0")),
        "OPTIONS": {"timeout": 20},
    },
    "other": {"ENGINE": "django.db.backends.sqlite3", "NAME": BASE_DIR / "other.sqlite3"},
}
if os.environ.get("SITE_POSTGRESQL"):
    from urllib.parse import urlsplit

    _url = urlsplit(os.environ["SITE_POSTGRESQL"])
    DATABASES["default"] = {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": _url.path.strip("/"),
        "USER": _url.username or "",
        "PASSWORD": _url.password or "",
        "HOST": _url.hostname or "",
        "PORT": _url.port or "",
        "CONN_MAX_AGE": None,
    }
    if os.environ.get("SITE_POOL"):
        _pool = {"min_size": 1, "max_size": 2}
        DATABASES["default"] |= {"CONN_MAX_AGE": 0, "OPTIONS": {"pool": _pool}}
TIDEMILL = {"RETRIES": 0}
if os.environ.get("SITE_STORE"):
    TIDEMILL["URL"] = os.environ["SITE_STORE"]
if os.environ.get("SITE_JOIN"):
    TIDEMILL["JOIN_ATOMIC"] = "default"
TASKS = {
    "default": {"BACKEND": "tidemill.django.TaskBackend", "QUEUES": ["default", "queue-1"]},
    "second": {
        "BACKEND": "tidemill.django.TaskBackend",
        "QUEUES": [],
        "OPTIONS": {"URL": f"lmdb://{BASE_DIR}/second", "RETRIES": 2},
    },
    "immediate": {
        "BACKEND": "django_tasks.backends.immediate.ImmediateBackend"
        if django.VERSION < (6, 0)
        else "django.tasks.backends.immediate.ImmediateBackend",
        "QUEUES": [],
    },
}
Q_CLUSTER = {"name": "shop", "timeout": 60, "max_attempts": 1, "save_limit": 250}
LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "handlers": {"null": {"class": "logging.NullHandler"}},
    "loggers": {"django.tasks": {"handlers": ["null"], "propagate": True}},
}
