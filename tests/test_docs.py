"""What the pages say: their Python runs, page by page, and their links lead somewhere."""

import importlib.util
import json
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PAGES = {p.name: p for p in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}


RUN_PAGES = """
import json, sys
for name, source in json.load(sys.stdin).items():
    exec(compile(source, name, "exec"), {"__name__": name})
"""


def test_python(tmp_path):
    """Each page has imported what it uses. One process for all: torch and JAX take their time. What
    pages write is left in a folder of the test's."""
    sources = {}
    for name, page in PAGES.items():
        source = "\n".join(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
        modules = set(re.findall(r"^(?:import|from) (\w+)", source, re.MULTILINE))
        if all(importlib.util.find_spec(module) for module in modules):
            sources[name] = source
    done = subprocess.run(
        [sys.executable, "-c", RUN_PAGES],
        input=json.dumps(sources),
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr


def test_the_files_of_a_walk_exist():
    text = PAGES["architecture.md"].read_text()
    files = re.findall(r"\b(?:src|bindings|tools|include)/[\w/]+\.\w+", text)
    assert len(files) > 15
    for file in files:
        assert (ROOT / file).exists(), file


@pytest.mark.parametrize("name", PAGES)
def test_links(name):
    for target in re.findall(r"\]\(([^)#:]+)\)", PAGES[name].read_text()):
        assert (PAGES[name].parent / target).exists(), target
