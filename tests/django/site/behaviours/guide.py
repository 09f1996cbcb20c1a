"""The code on the pages about Django can be compiled, and what it imports from tidemill exists."""

import ast
import importlib
import re
from pathlib import Path

from django.test import SimpleTestCase

DOCS = Path(__file__).parents[4] / "docs"


class Pages(SimpleTestCase):
    def test_the_names_on_the_pages_exist(self):
        for page in ("guide/django.md", "guide/django-tasks.md", "how-to/from-django-q.md"):
            text = (DOCS / page).read_text()
            blocks = re.findall(r"^ *```py(?:thon)?\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE)
            self.assertGreater(len(blocks), 1)
            for node in (node for block in blocks for node in ast.walk(ast.parse(block))):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tidemill"):
                    module = importlib.import_module(node.module)
                    for alias in node.names:
                        self.assertTrue(hasattr(module, alias.name), alias.name)

    def test_each_key_of_the_setting_is_in_the_table(self):
        from tidemill.django.settings import KEYS

        text = (DOCS / "guide" / "django.md").read_text()
        for key in KEYS:
            self.assertIn(f"`{key}`", text)
