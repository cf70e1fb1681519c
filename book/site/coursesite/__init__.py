"""The site's own Sphinx extension: what Jupyter Book does not do for this course.

`origin` tells the theme where the repository is, `chapters` completes a notebook's page, `gather`
fills pages from the catalog and from files beside the chapters, `calculators` puts calculators into
pages, `publish` adds what search engines and feeds want, `demands` refuses what Sphinx lets pass,
`anchors` numbers figures and names glossary terms, `objects` lets the search find those terms and
the exercises, `figures` draws the figures into the page,
`formulas` renders the maths, `assets` bundles styles, scripts and fonts, and `repairs` mends what
the theme gets wrong.
"""

from coursesite import (
    anchors,
    assets,
    calculators,
    chapters,
    demands,
    figures,
    formulas,
    gather,
    highlighting,
    navigation,
    objects,
    origin,
    publish,
    repairs,
    speed,
)


def setup(app):
    for module in (
        origin,
        publish,
        assets,
        chapters,
        gather,
        calculators,
        demands,
        objects,
        anchors,
        figures,
        formulas,
        highlighting,
        navigation,
        repairs,
        speed,
    ):
        module.setup(app)
    return {"parallel_read_safe": False, "parallel_write_safe": True}
