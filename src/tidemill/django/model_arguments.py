"""Model instances as arguments of tasks, by their primary key, for models with ``pass_by_key``."""

from __future__ import annotations

from typing import Any, TypeVar

from django.apps import apps
from django.db import models

from tidemill.core.converters import converter_of, register_converter
from tidemill.errors import CodecError, InvalidOption

M = TypeVar("M", bound=type[models.Model])
MODEL = "django model"  # names the model in a key, for a parameter without an annotation


def pass_by_key(model: M) -> M:
    """Let instances of a model be arguments of tasks. The job stores the primary key.

    Use this as a decorator of the model, or call it where the model is defined. Annotate the
    parameter of the task with the model: then the task gets an instance. The first use of a field
    reads the row. So the task sees the values of that moment. If the row is gone, this first use
    raises ``DoesNotExist``. An async task must first call ``await instance.arefresh_from_db()``.

    Raises:
        InvalidOption: the argument is no model.
    """
    if not isinstance(model, type) or not issubclass(model, models.Model):
        raise InvalidOption(f"pass_by_key takes a model, not {model!r}")
    register_converter(model, to=_key, back=lambda data: _instance(model, data))
    return model


def _key(instance: models.Model) -> dict[str, Any]:
    if instance.pk is None:
        raise CodecError(
            f"this {type(instance).__name__} has no key yet; save it before you enqueue the task"
        )
    return {"pk": instance.pk, "using": instance._state.db or "default"}


def _instance(model: Any, data: dict[str, Any]) -> Any:
    """An instance with only its primary key. The first use of another field reads all fields."""
    key: Any = model._meta.pk
    instance: Any = model.from_db(data["using"], [key.attname], [key.to_python(data["pk"])])

    def read_all(using: str | None = None, fields: Any = None, **more: Any) -> None:
        del instance.__dict__["refresh_from_db"]
        every = [field.attname for field in model._meta.concrete_fields if field is not key]
        instance.refresh_from_db(using, fields=every, **more)

    instance.refresh_from_db = read_all
    return instance


# For functions without annotations, as those of django-q:


def to_key(value: Any) -> Any:
    """The key of an instance whose model has ``pass_by_key``; any other value as it is."""
    model: Any = type(value)
    if not isinstance(value, models.Model) or converter_of(model) is None:
        return value
    return {MODEL: model._meta.label, **_key(value)}


def of_key(value: Any) -> Any:
    """The instance of a key from :func:`to_key`; any other value as it is."""
    if not isinstance(value, dict) or MODEL not in value:
        return value
    return _instance(apps.get_model(value[MODEL]), value)
