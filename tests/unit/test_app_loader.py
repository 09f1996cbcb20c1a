"""Finding the app of a worker: each mistake is named in the user's own terms."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from tidemill import InvalidOption
from tidemill.app_loader import load_app
from tidemill.cli import main

APP = "from tidemill import Tidemill\nmill = Tidemill('memory://')\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, with modules that are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("lod_shop:mil", "no Tidemill named 'mil'; did you mean 'mill'"),
        ("lod_shop:tide", "no Tidemill named 'tide'; known are mill"),
        ("lod_shp:mill", "no module 'lod_shp' from .*; did you mean 'lod_shop'"),
        ("lod_shop.mill", "did you mean 'lod_shop:mill'"),
        ("lod_pkg.taks:mill", "did you mean 'lod_pkg.tasks'"),
        ("lod_pkg/tasks:mill", "write 'lod_pkg.tasks'"),
        ("nowhere_at_all:mill", "name the app as module:variable"),
        ("tidemill.django:mill", "run: manage.py tidemill worker"),
        ("lod_shp.py:mill", "there is no file .*lod_shp.py"),
        ("lod_shop:make", r"lod_shop.make is a function and no Tidemill; .* mill = make\(\)"),
        ("lod_shop:PORT", "lod_shop.PORT is of type int, not Tidemill; known are mill"),
        ("lod_pkg", "lod_pkg has no Tidemill; did you mean 'lod_pkg.tasks:mill'"),
        ("lod_pkg:app", "lod_pkg has no Tidemill; did you mean 'lod_pkg.tasks:mill'"),
        ("lod_pkg.bare", "lod_pkg.bare has no Tidemill; name the module that makes the app"),
        ("lod_two", "lod_two has several Tidemills: b, a; write one as lod_two:a"),
    ],
)
def test_a_near_miss_is_named(folder: Path, spec: str, sentence: str) -> None:
    (folder / "lod_shop.py").write_text(APP + "PORT = 1\ndef make(): return mill\n")
    (folder / "lod_two.py").write_text(
        "from tidemill import Tidemill\nb = Tidemill('memory://')\na = Tidemill('memory://')\n"
    )
    (folder / "lod_pkg").mkdir()
    (folder / "lod_pkg" / "__init__.py").touch()
    (folder / "lod_pkg" / "tasks.py").write_text(APP)
    (folder / "lod_pkg" / "bare.py").touch()
    (folder / "lod_pkg" / "broken.py").write_text("1 / 0\n")
    with pytest.raises(InvalidOption, match=sentence):
        load_app(spec)


def test_a_broken_import_shows_the_users_lines_only(folder: Path) -> None:
    # given a module that imports another one, which fails in the standard library
    (folder / "lod_deep.py").write_text("import json\nx = 1\njson.loads('{')\n")
    (folder / "lod_top.py").write_text(APP + "import lod_deep\n")
    with pytest.raises(InvalidOption) as caught:
        load_app("lod_top:mill")
    text = str(caught.value)
    # then the first line says what, the others where: two files of the user's, one of a library's
    assert text.startswith("the app lod_top:mill cannot be imported: json.decoder.JSONDecodeError:")
    places = [line.split('"')[1] for line in text.splitlines() if line.startswith("  File ")]
    assert [Path(place).name for place in places] == ["lod_top.py", "lod_deep.py", "decoder.py"]
    assert "json.loads('{')" in text
    assert "importlib" not in text


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("def f(:\n    pass\n", "SyntaxError"),
        ("import sys\nsys.exit(3)\n", "SystemExit: 3"),
        ("import no_such_driver\n", "No module named 'no_such_driver'"),
        (APP + "@mill.task(retires=3)\ndef f(): ...\n", "did you mean 'retries'"),
    ],
)
def test_the_place_of_a_mistake_is_named(folder: Path, source: str, said: str) -> None:
    (folder / "lod_bad.py").write_text(source)
    with pytest.raises(InvalidOption) as caught:
        load_app("lod_bad")
    assert said in str(caught.value)
    assert 'lod_bad.py", line ' in str(caught.value)
    assert "loader.py" not in str(caught.value)
    assert "options.py" not in str(caught.value)


@pytest.mark.parametrize(
    ("words", "named"),
    [((), "of_variable"), (("--workers", "of_worker"), "of_worker"), (("given",), "given")],
)
def test_the_server_takes_its_app_from_the_environment_last(
    words: tuple[str, ...], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIDEMILL_APP", "of_variable")
    monkeypatch.setenv("TIDEMILL_URL", "nowhere://")  # a server without an app ends at once
    result = CliRunner().invoke(main, ["server", "--port", "0", *words])
    assert result.exit_code == 2
    assert f"no module '{named}'" in result.stderr
