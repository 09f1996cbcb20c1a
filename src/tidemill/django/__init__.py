"""tidemill in a Django project.

    INSTALLED_APPS = [..., "tidemill.django"]
    TIDEMILL = {"URL": "lmdb://./jobs"}

    # shop/tasks.py
    from tidemill.django import mill

    @mill.task(retries=5)
    def send_receipt(order_id): ...

Each of the attributes below is made at its first use. So an import of this package opens no store
and reads no setting.

Attributes:
    mill: the project's app, made from the setting ``TIDEMILL``.
    TaskBackend: the backend for the setting ``TASKS``. It is made for ``django.tasks``, or for
        ``django_tasks`` with a Django that has no tasks.
    Task: the class of the backend's tasks, which have the options of tidemill.
    task: the decorator of ``django.tasks``, with the options of tidemill, on every version of
        Django.
    BackportTaskBackend: the backend for the package ``django_tasks``, on every version of Django.
    pass_by_key: lets instances of a model be arguments of tasks, by their primary key.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tidemill.django.project import DjangoMill

    mill: DjangoMill
    task: Any
    Task: Any
    TaskBackend: Any
    BackportTaskBackend: Any
    from tidemill.django.model_arguments import pass_by_key as pass_by_key

__all__ = ["BackportTaskBackend", "Task", "TaskBackend", "mill", "pass_by_key", "task"]


def __getattr__(name: str) -> Any:
    if name == "mill":
        from tidemill.django.project import project_mill

        return project_mill()
    if name == "pass_by_key":
        from tidemill.django.model_arguments import pass_by_key

        return pass_by_key
    if name in __all__:
        from tidemill.django.framework.backend import public

        return public(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
