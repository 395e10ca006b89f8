"""The documentation as a site: `./run docs` builds it, and a warning is an error."""

import pkgutil
import re
import sys

from sphinx.pycode import ModuleAnalyzer

import jax_cp_dispatch

project = "jax_cp_dispatch"
author = "the authors of jax_cp_dispatch"
release = jax_cp_dispatch.__version__

# The root of the repository is the source, so pages may link to the README and to examples.
include_patterns = ["*.md", "docs/**.md", "examples/*.md", "tests/data/*.md"]
root_doc = "docs/README"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
default_role = "py:obj"  # `name` in a docstring links to what has that name; else it is code
highlight_language = "none"  # of what does not say its language
myst_heading_anchors = 3  # links to headings, as the pages have them

autodoc_default_options = {"members": True, "member-order": "bysource"}
add_module_names = False
maximum_signature_line_length = 88
napoleon_custom_sections = [("Attributes", "params_style")]  # in the text of their class
python_use_unqualified_type_names = True
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_title = f"{project} {release}"


def _add_toctrees(app, docname, source):
    """The lists of an index become the site's navigation: a page that none names is a warning."""
    if docname not in (root_doc, "docs/api/README", "docs/decisions/README"):
        return
    caption, pages = "", []
    for line in [*source[0].splitlines(), "## "]:
        if line.startswith("## "):
            options = [":hidden:", *([f":caption: {caption}"] if caption else [])]
            source[0] += "\n".join(["\n", "```{toctree}", *options, "", *pages, "```", ""])
            caption, pages = line[3:], []
        elif found := re.match(r"- \[.*?\]\(([\w./-]+)\.md\)", line):
            pages.append(found[1])


def _skip_fields(app, what, name, obj, skip, options):
    """Fields of a NamedTuple are described in its docstring; their own says "Alias for ..."."""
    return True if type(obj).__name__ == "_tuplegetter" else None


def _describe_constant(app, what, name, obj, options, lines):
    """Returns a constant's documentation: the string below it, in the module that defines it."""
    if what == "data":
        package, _, attribute = name.rpartition(".")
        for module in pkgutil.iter_modules(sys.modules[package].__path__, f"{package}."):
            found = ModuleAnalyzer.for_module(module.name).find_attr_docs()
            lines[:] = found.get(("", attribute), lines)


def _shorten_types(app, what, name, obj, options, signature, returns):
    shorten = lambda text: text and re.sub(r"\b(jaxlib\._jax|jaxtyping)\.", "", text)
    return shorten(signature), shorten(returns)


def _find_by_last_name(app, env, node, contnode):
    """A docstring names `create_dispatch_buffer` without the module that it is imported from."""
    python, target = env.domains.python_domain, node.get("reftarget", "")
    found = [
        name
        for name, entry in python.objects.items()
        if name.endswith(f".{target}") and entry.objtype in ("class", "data", "function")
    ]
    if len(found) == 1:
        arguments = (env, node["refdoc"], app.builder, "obj", found[0], node, contnode)
        return python.resolve_xref(*arguments)
    return None


def setup(app):
    app.connect("missing-reference", _find_by_last_name)
    app.connect("autodoc-process-docstring", _describe_constant)
    app.connect("autodoc-process-signature", _shorten_types)
    app.connect("source-read", _add_toctrees)
    app.connect("autodoc-skip-member", _skip_fields)
