"""Sphinx: `make docs` builds the site into docs/_build/html, without a network."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

DOCS = Path(__file__).parent
REPOSITORY = DOCS.parent
sys.path[:0] = [str(REPOSITORY), str(DOCS / "_ext")]
os.environ.setdefault("OMP_NUM_THREADS", "1")  # the tutorials' networks are small

import minerva_torchrl

project = "minerva_torchrl"
author = "The minerva_torchrl authors"
copyright = author
version = release = minerva_torchrl.__version__
language = "en-GB"

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx.ext.mathjax",
    "sphinx-mathjax-offline",
    "sphinx_gallery.gen_gallery",
    "myst_parser",
    "annotated_source",
    "reference_tables",
    "repository_links",
]
exclude_patterns = ["_build", "tutorials/README.rst", "upstream/**", "auto_tutorials/*.ipynb"]
nitpicky = False

# Pages ------------------------------------------------------------------------------------------

myst_enable_extensions = ["dollarmath", "colon_fence", "deflist"]
myst_heading_anchors = 3

html_theme = "furo"
html_title = "minerva_torchrl"
templates_path = ["_templates"]
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_favicon = "_static/favicon.svg"
html_show_sphinx = False
html_show_copyright = False
html_copy_source = False
html_theme_options = {"navigation_with_keys": True}
pygments_style = "friendly"
pygments_dark_style = "native"

# Reference --------------------------------------------------------------------------------------

autosummary_generate = True
autosummary_imported_members = False
autodoc_typehints = "none"  # docstrings name the types, in words
autodoc_member_order = "bysource"
# Members of these classes and of what they inherit from are documented elsewhere.
_FOREIGN = "LossModule,Module,ValueEstimatorBase,TensorDictModuleBase,Trainer,EnvBase,Transform,"
_FOREIGN += "OptimizationStepper,TrainerHookBase,Sampler,ClipPPOLoss,Mapping,Exception,tuple,object"
autodoc_default_options = {"members": True, "inherited-members": _FOREIGN}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
viewcode_line_numbers = True

# Tutorials --------------------------------------------------------------------------------------

sphinx_gallery_conf = {
    "examples_dirs": "tutorials",
    "gallery_dirs": "auto_tutorials",
    "filename_pattern": r"\.py$",
    "within_subsection_order": "FileNameSortKey",
    "download_all_examples": False,
    "show_memory": False,
    "capture_repr": (),  # what a page shows, it prints
    "min_reported_time": 1e6,  # how busy the machine was is no news
    "write_computation_times": False,  # its pages load scripts from elsewhere
    "show_signature": False,
    "remove_config_comments": True,
    "reset_modules": ("matplotlib",),
    "plot_gallery": os.environ.get("DOCS_TUTORIALS", "run") == "run",
}
warnings.filterwarnings("ignore", category=DeprecationWarning, module="torchrl")
