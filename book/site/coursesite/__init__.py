"""The site's own Sphinx extension: what Jupyter Book does not do for this course.

`origin` tells the theme where the repository is, `chapters` completes a notebook's page, `gather`
fills pages from the catalog and from files beside the chapters, `anchors` numbers figures and
names glossary terms, `formulas` renders the maths, `assets` adds styles and fonts, and `repairs`
mends what the theme gets wrong.
"""

from coursesite import anchors, assets, chapters, formulas, gather, origin, repairs


def setup(app):
    for module in (origin, assets, chapters, gather, anchors, formulas, repairs):
        module.setup(app)
    return {"parallel_read_safe": False, "parallel_write_safe": True}
