from __future__ import annotations

import doctest
from importlib.metadata import version as installed_version

from docutils import nodes
from sphinx.application import Sphinx

project = "easydist"
release = installed_version("easydist")
version = release
copyright = "the easydist contributors"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.doctest",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = f"easydist {release}"
html_static_path = ["_static"]
html_favicon = "_static/favicon.svg"
html_theme_options = {"light_logo": "logo-light.svg", "dark_logo": "logo-dark.svg", "sidebar_hide_name": True}

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
# The sections of a docstring, see CONTRIBUTING.md.
napoleon_custom_sections = ["Law", "Cost", "Source"]

# Every example starts as a reader would, in a world of one.
# Sphinx's default also ignores what an exception says; our messages are part of the promise.
doctest_default_flags = doctest.ELLIPSIS | doctest.DONT_ACCEPT_TRUE_FOR_1
doctest_global_setup = "import easydist\nimport torch"
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True


def _execute_sessions(app: Sphinx, doctree: nodes.document) -> None:
    """Let the doctest builder run plain fenced blocks too, so that pages also read well outside Sphinx."""
    for block in doctree.findall(nodes.literal_block):
        if block.astext().startswith(">>> ") and "testnodetype" not in block:
            block["testnodetype"] = "doctest"
            block["groups"] = ["default"]


def setup(app: Sphinx) -> None:
    app.connect("doctree-read", _execute_sessions)
