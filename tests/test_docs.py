"""What the pages say: their Python runs, page by page, and their links lead somewhere."""

import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PAGES = {p.name: p for p in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}


@pytest.mark.parametrize("name", [n for n, p in PAGES.items() if "```python" in p.read_text()])
def test_python(name):
    source = "\n".join(re.findall(r"```python\n(.*?)```", PAGES[name].read_text(), re.DOTALL))
    for module in set(re.findall(r"^(?:import|from) (\w+)", source, re.MULTILINE)):
        pytest.importorskip(module)
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", PAGES)
def test_links(name):
    for target in re.findall(r"\]\(([^)#:]+)\)", PAGES[name].read_text()):
        assert (PAGES[name].parent / target).exists(), target
