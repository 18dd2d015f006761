"""Settings of the documentation site: `make docs` builds it into build/docs."""

import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "extensions"), str(HERE.parent)]

project = "dmltrain"
author = "the dmltrain authors"
copyright = author
version = re.search(r'^__version__ = "(.+)"', (HERE.parent / "dmltrain/version.py").read_text(), re.MULTILINE).group(1)
release = version

extensions = ["myst_parser", "sphinx.ext.autodoc", "from_code"]
exclude_patterns = ["extensions"]
html_theme = "furo"
html_title = f"dmltrain {version}"
html_copy_source = False
html_show_sphinx = False
html_baseurl = os.environ.get("READTHEDOCS_CANONICAL_URL", "")  # of the version that search engines should show

myst_heading_anchors = 3  # headings can be linked to as page.md#heading, as on GitHub
smartquotes = False  # -- stays --
default_role = "literal"  # `name` in a docstring is code

autodoc_mock_imports = [module for module in ("torch",) if find_spec(module) is None]
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
# Every reference must resolve (-n) but those to types in signatures: other projects' documentation is not fetched.
nitpick_ignore_regex = [("py:.*", ".*")]
