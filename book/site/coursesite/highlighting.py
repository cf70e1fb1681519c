"""Code in few colours: a token has a class only where the style gives it a colour of its own.

Pygments marks every name, bracket and space, which is two thirds of a chapter's elements.
"""

from pygments.formatters import HtmlFormatter
from pygments.token import Comment, Generic, Keyword, Name, Number, Operator, String
from sphinx.highlighting import PygmentsBridge

KINDS = (  # the first that a token belongs to; what belongs to none is plain
    (Keyword.Constant, "m"),
    (Keyword.Type, ""),
    (Keyword, "k"),
    (Operator.Word, "k"),
    (Comment, "c"),
    (String, "s"),
    (Number, "m"),
    (Name.Function, "nf"),
    (Name.Class, "nf"),
    (Name.Decorator, "m"),
    (Name.Exception, "m"),
    (Generic.Prompt, "gp"),
    (Generic.Output, "c"),
)


class FewColours(HtmlFormatter):
    def _get_css_classes(self, ttype):
        return next((name for kind, name in KINDS if ttype in kind), "")


def setup(app):
    PygmentsBridge.html_formatter = FewColours
