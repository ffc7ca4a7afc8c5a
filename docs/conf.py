from __future__ import annotations

import doctest
import os
import re
from pathlib import Path

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util.nodes import make_refnode

from easydist import __version__

project = "easydist"
release = __version__
version = release
copyright = "the easydist contributors"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.doctest",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = f"easydist {release}"
html_static_path = ["_static"]
html_css_files = ["blocks.css"]
html_search_scorer = str(Path(__file__).with_name("search_scorer.js"))
html_favicon = "_static/favicon.svg"
html_theme_options = {"light_logo": "logo-light.svg", "dark_logo": "logo-dark.svg", "sidebar_hide_name": True}

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

# Without the class in front, the names of methods fit into the contents of the page.
toc_object_entries_show_parents = "hide"

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
# The sections of a docstring, see CONTRIBUTING.md.
napoleon_custom_sections = ["Law", "Cost", "Source"]

# Links to the types of other projects need their inventories: from their sites with INTERSPHINX=online, or from a
# folder with python.inv, torch.inv and numpy.inv. Otherwise a build needs no network.
_SITES = {
    "python": "https://docs.python.org/3",
    "torch": "https://docs.pytorch.org/docs/stable",
    "numpy": "https://numpy.org/doc/stable",
}
_FROM = os.environ.get("INTERSPHINX")
intersphinx_mapping = {
    name: (site, None if _FROM == "online" else str(Path(_FROM, f"{name}.inv").resolve()))
    for name, site in _SITES.items()
    if _FROM
}

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


# On these pages the names are often those of another library, or of methods.
_WITHOUT_LINKS = re.compile(r"api|backends|communicators|parallel|coming_from_.*|design/.*")
_NAME = re.compile(r"(?:easydist\.)?([A-Za-z_][\w.]*)(?:\(.*\))?", re.DOTALL)


def _link_names(app: Sphinx, doctree: nodes.document, page: str) -> None:
    """Link `gather`, `gather(x, dst=0)` or `metrics.compute` on a page to its entry in the reference."""
    if _WITHOUT_LINKS.fullmatch(page):
        return
    objects = app.env.get_domain("py").objects
    for literal in list(doctree.findall(nodes.literal)):
        match = _NAME.fullmatch(literal.astext())
        entry = objects.get(f"easydist.{match[1]}") if match else None
        is_free = not isinstance(literal.parent, (nodes.reference, nodes.title, nodes.caption))
        if entry and entry.objtype != "module" and is_free:
            literal.replace_self(make_refnode(app.builder, page, entry.docname, entry.node_id, literal.deepcopy()))


def _link_type(app: Sphinx, env: BuildEnvironment, node: pending_xref, shown: nodes.Element) -> nodes.Element | None:
    """Link a name of ``easydist.typing`` in a signature, where Sphinx looks for classes only."""
    entry = env.get_domain("py").objects.get(f"easydist.typing.{node.get('reftarget')}")
    return make_refnode(app.builder, node["refdoc"], entry.docname, entry.node_id, shown) if entry else None


def setup(app: Sphinx) -> None:
    app.connect("missing-reference", _link_type)
    app.connect("doctree-read", _execute_sessions)
    app.connect("doctree-resolved", _link_names)
