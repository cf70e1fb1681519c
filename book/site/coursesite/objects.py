"""Exercises and glossary terms as things that the search finds by name, each at its place."""

import re
from typing import ClassVar

from docutils import nodes
from sphinx.domains import Domain, ObjType

ANSWER = re.compile(r"One answer: <code>(\w+)</code>")  # in the fold of `coursesite.chapters`


class CourseDomain(Domain):
    """What the course names: anchor and kind of every exercise and term, by page."""

    name = "course"
    label = "Course"
    object_types: ClassVar = {"exercise": ObjType("exercise"), "term": ObjType("term")}
    initial_data: ClassVar = {"objects": {}}  # (kind, name) -> (page, anchor)
    data_version = 1

    def note(self, kind: str, name: str, page: str, anchor: str) -> None:
        self.data["objects"][kind, name] = (page, anchor)

    def clear_doc(self, docname: str) -> None:
        objects = self.data["objects"]
        self.data["objects"] = {k: at for k, at in objects.items() if at[0] != docname}

    def get_objects(self):
        for (kind, name), (page, anchor) in self.data["objects"].items():
            yield name, name, kind, page, anchor, 1


def note_exercises(app, doctree):
    """`doctree-read`: an exercise is found by the name that its answer defines."""
    for section in doctree.findall(nodes.section):
        if not section["ids"][0].startswith("exercise-"):
            continue
        for fold in section.findall(nodes.raw):
            for key in ANSWER.findall(fold.astext()):
                domain = app.env.get_domain("course")
                domain.note("exercise", key, app.env.docname, section["ids"][0])


def setup(app):
    app.add_domain(CourseDomain)
    app.connect("doctree-read", note_exercises)
